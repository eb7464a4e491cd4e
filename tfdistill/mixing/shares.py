"""What the versions of a mix count, and this group's own weights."""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from tfdistill.exchange import versions

GROUPS, EXAMPLES = "groups", "examples"
_WEIGHINGS = (GROUPS, EXAMPLES)


def count_of(version: versions.Version, unit: str) -> float:
    """Returns the examples that a version says its group has had."""
    found: Any = version.manifest.extras.get(unit)
    return max(float(found), 0.0) if isinstance(found, int | float) else 0.0


class Shares:
    """Counts what groups trained on since they and this one last mixed."""

    def __init__(self, weigh_by: str) -> None:
        """Counts nothing yet. ValueError if `weigh_by` is no way to count."""
        if weigh_by not in _WEIGHINGS:
            raise ValueError(
                f"`weigh_by` must be one of {_WEIGHINGS}; received "
                f"{weigh_by!r}."
            )
        self.weigh_by = weigh_by
        # By group, the count of its version that was mixed last, and this
        # group's own then.
        self._counted: dict[int, tuple[float, float]] = {}

    def forget(self) -> None:
        """Begins a training anew."""
        self._counted.clear()

    def of(self, mixed: Sequence[versions.Version]) -> list[float]:
        """Returns what these versions count, each of another group."""
        return [
            self._added(
                count_of(version, self.weigh_by),
                self._counted.get(version.group, (0.0, 0.0))[0],
            )
            for version in mixed
        ]

    def note(self, mixed: Sequence[versions.Version], exporter: Any) -> float:
        """Remembers a mix with these versions; returns what own weights count.

        The `StudentExporter` knows what this group has trained on.
        """
        own = self._seen(exporter)
        before = [self._counted.get(v.group, (0.0, 0.0))[1] for v in mixed]
        for version in mixed:
            theirs = count_of(version, self.weigh_by)
            self._counted[version.group] = theirs, own
        return self._added(own, max(before))

    def _seen(self, exporter: Any) -> float:
        if self.weigh_by == GROUPS:
            return 0.0  # Counting examples waits for the last step.
        return float(exporter.counts[self.weigh_by])

    def _added(self, count: float, before: float) -> float:
        if self.weigh_by == GROUPS:
            return 1.0
        # A group that resumed may be at fewer than before.
        return max(count - before, 1.0)

    def state(self) -> dict[str, Any]:
        """Returns what a resumed training goes on with, as JSON has it."""
        return {str(group): pair for group, pair in self._counted.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` returned."""
        self._counted = {int(g): (a, b) for g, (a, b) in state.items()}
