"""The mean of the peers' versions, and what each counts in it."""

import logging
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdistill.exchange import versions
from tfdistill.follow import follower
from tfdistill.mixing import weights

_log = logging.getLogger(__name__)
_WEIGHINGS = GROUPS, EXAMPLES = "groups", "examples"


class PeersMean:
    """Counts what groups trained on since they and this one last mixed."""

    def __init__(self, weigh_by: str) -> None:
        """Counts nothing yet. ValueError if `weigh_by` is no way to count."""
        if weigh_by not in _WEIGHINGS:
            raise ValueError(
                f"`weigh_by` must be one of {_WEIGHINGS}; received "
                f"{weigh_by!r}."
            )
        self._weigh_by = weigh_by
        # By group, the examples of its version that was mixed last, and this
        # group's own then.
        self._counted: dict[int, tuple[float, float]] = {}
        # The mean, by what it consists of.
        self._known: tuple[Any, list[tf.Tensor]] = None, []

    def find(
        self, staged: Sequence[follower.Staged], mixed: weights.MixedWeights
    ) -> tuple[list[tf.Tensor], list[float]]:
        """Returns the mean and what each version counts; in any thread."""
        counts = [
            self._added(_examples(s.version), self._before(s.version)[0])
            for s in staged
        ]
        key = [(s.version.group, s.version.step) for s in staged], counts
        known = self._known
        if known[0] != key:
            mean = mixed.mean_of([s.values for s in staged], counts)
            known = self._known = key, mean
        return known[1], counts

    def find_ahead(
        self, staged: Sequence[follower.Staged], mixed: weights.MixedWeights
    ) -> None:
        """Finds the mean on the reading thread, before a mix needs it."""
        try:
            if staged:
                self.find(staged, mixed)
        except Exception:  # A mix that needs the mean will find out.
            _log.exception("The mean of %d versions failed.", len(staged))

    def note(self, mixed: Sequence[versions.Version], exporter: Any) -> float:
        """Remembers a mix with these versions; returns what own weights count.

        The exporter knows what this group has trained on.
        """
        self._known = None, []
        own = 0.0
        if self._weigh_by == EXAMPLES:  # To count them waits for a step.
            own = float(exporter.counts["examples"])
        before = max(self._before(version)[1] for version in mixed)
        for version in mixed:
            self._counted[version.group] = _examples(version), own
        return self._added(own, before)

    def _before(self, version: versions.Version) -> tuple[float, float]:
        return self._counted.get(version.group, (0.0, 0.0))

    def _added(self, count: float, before: float) -> float:
        if self._weigh_by == GROUPS:
            return 1.0
        # A group that resumed may be at fewer than before.
        return max(count - before, 1.0)

    def state(self) -> dict[str, Any]:
        """Returns what a resumed training goes on with, as JSON has it."""
        return {str(group): pair for group, pair in self._counted.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` returned."""
        self._counted = {int(g): (a, b) for g, (a, b) in state.items()}


def _examples(version: versions.Version) -> float:
    """What a version says its group has trained on."""
    found: Any = version.manifest.extras.get(EXAMPLES)
    return max(float(found), 0.0) if isinstance(found, int | float) else 0.0
