"""WaitForGroups: groups of a short run begin together."""

import contextlib
import logging
import pathlib
import time

import keras

from tfdistill.cluster import identity
from tfdistill.system import fits
from tfdistill.system import run_files
from tfdistill.training import steps

# Files in a group's directory once the group has taken its first step, and once
# its training is over.
_STARTED, _ENDED = "started", "ended"
_LOOK_SECS = 0.01
_log = logging.getLogger(__name__)


class WaitForGroups(keras.callbacks.Callback):
    """Waits after the first step until every group has completed its own.

    Groups never wait for each other in a long training: the one that starts
    first has no teacher for a moment. A run of a minute would lose much of its
    time to start-up. The groups see each other's first steps in the workdir of
    the run.

    Example:
        ```python
        callbacks = [WaitForGroups(), *defaults(every_steps=50)]
        ```
    """

    # The other workers of the group wait for it in their next step.
    chief_only = True

    def __init__(
        self,
        cluster: identity.Cluster | None = None,
        *,
        limit_secs: float = 600.0,
    ) -> None:
        """Waits for nothing yet.

        Args:
            cluster: Says which group this is, and where the run's files are.
                Defaults to the environment's.
            limit_secs: Longest wait; then training continues without the
                others, with a warning. Default 600.

        Raises:
            ValueError: There are several groups and no workdir.
        """
        super().__init__()
        cluster = cluster or identity.Cluster.from_env()
        if cluster.num_groups > 1 and cluster.workdir is None:
            raise ValueError(
                "`cluster` must have a workdir, where groups see each other "
                f"start; it has no workdir and {cluster.num_groups} groups. "
                "Set TFDISTILL_WORKDIR, or pass tfdistill.Cluster(workdir=...)."
            )
        self._cluster = cluster
        self.limit_secs = limit_secs
        self._number, self._has_started = 1, False
        self.waited_secs = 0.0

    def on_train_begin(self, logs: steps.Logs | None = None) -> None:
        """Finds which training of this process it is: each has a first step."""
        number = fits.number(
            f"{self._cluster.group_dir}/{_STARTED}", of=self.model.optimizer
        )
        self._has_started = self._has_started and number == self._number
        self._number = number
        with contextlib.suppress(OSError):
            self._marker(_ENDED).unlink()

    def next_due(self, step: int) -> int | None:
        """Returns none: it waits after the first execution, of any length."""
        return None

    def announce_end(self) -> None:
        """Announces that this group publishes no more versions."""
        if self._cluster.workdir is not None and self._cluster.is_chief:
            self._touch(_ENDED)

    def has_ended(self, group: int) -> bool:
        """Whether another group's training is over."""
        return self._marker(_ENDED, group).exists()

    def _marker(self, name: str, group: int | None = None) -> pathlib.Path:
        group = self._cluster.group if group is None else group
        if self._number > 1:
            name = f"{name}_{self._number}"
        return pathlib.Path(
            str(self._cluster.workdir), run_files.group_name(group), name
        )

    def _touch(self, name: str) -> None:
        own = self._marker(name)
        try:
            own.parent.mkdir(parents=True, exist_ok=True)
            own.touch()
        except OSError as error:
            _log.warning(
                "This group could not report that it %s: %s", name, error
            )

    def on_train_batch_end(
        self, batch: int, logs: steps.Logs | None = None
    ) -> None:
        """Announces this group's first step, and waits for the others'."""
        if self._has_started or self._cluster.workdir is None:
            return
        self._has_started = True
        if logs:
            float(logs["loss"])  # Steps may be running still.
        start = time.monotonic()
        self._touch(_STARTED)
        markers = [
            self._marker(_STARTED, group)
            for group in range(self._cluster.num_groups)
        ]
        while missing := [path for path in markers if not path.exists()]:
            if time.monotonic() - start > self.limit_secs:
                _log.warning(
                    "Waited %.0f s for the first step of %s; training "
                    "continues.",
                    self.limit_secs,
                    ", ".join(path.parent.name for path in missing),
                )
                break
            time.sleep(_LOOK_SECS)
        self.waited_secs += time.monotonic() - start
