"""TeacherLoader: teachers change between steps."""

import time
import warnings
from collections.abc import Sequence
from typing import Any

import keras

from tfdistill.cluster import replicas
from tfdistill.cluster import strategy as strategy_lib
from tfdistill.follow import screen
from tfdistill.system import background
from tfdistill.training import steps
from tfdistill.training import wait_for_groups

Logs = steps.Logs
# So often a group looks for the first versions of others once its burn-in is
# over, for so many of its intervals.
_SOON_STEPS, _SOON_INTERVALS = 5, 2
# Where groups wait for each other: for so long, however short the burn-in was.
_LEAST_WAIT_SECS = 10.0
_LOOK_SECS = 0.01


class TeacherLoader(steps.Loader):
    """Loads newer teachers at regular steps, the same on all workers.

    A background thread looks for versions and reads them, from the start of
    `fit` to its end. Between steps, training pays only for one small
    collective and, when a version is ready on all workers, for its assignment.

    Beside a `WaitForGroups`, training waits a second time, where the burn-in
    ends: until the first version of each other group is in use or was refused,
    unless that group is done, or for as long as it has trained so far.
    """

    def __init__(self, *, every_steps: int) -> None:
        """Reads nothing yet.

        Args:
            every_steps: Steps between refreshes, >= 1.
        """
        super().__init__()
        own = steps.EverySteps(every_steps).every_steps
        # To look less often than there is news would hide the interval.
        self._schedule = steps.EverySteps(
            min(own, strategy_lib.compared_steps(own))
        )
        self.num_refreshes = self._refreshed = 0
        self._burn_in: Any = None
        self._exporter: Any = None
        self._waits: wait_for_groups.WaitForGroups | None = None
        self.blocked = background.WorkTimes()
        # Time of the last refresh, and the pause before it.
        self._last_time, self._pause_secs = time.monotonic(), 0.0

    def meet(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        """Finds what ends the burn-in, and whether groups then wait."""
        self._burn_in = steps.first(callbacks, steps.BurnIn)
        self._exporter = steps.first(callbacks, steps.Exporter)
        self._waits = steps.first(callbacks, wait_for_groups.WaitForGroups)

    def manifest_extras(self) -> dict[str, Any]:
        """Returns how long this group takes to receive each peer's version."""
        secs = self.codistilled.teachers.peers.read_secs
        if not secs:
            return {}
        # A version that was read is used at the next refresh.
        return {screen.HEARS_FIELD: round(secs + self._pause_secs, 3)}

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Starts the reading thread."""
        super().on_train_begin(logs)
        self._schedule.start(self.step)
        model = self.codistilled
        teachers = model.teachers
        self._began = time.monotonic()
        self._values = replicas.WorkerValues(model.distribute_strategy)
        cluster = strategy_lib.cluster_of(model.distribute_strategy)
        num_peers = len(cluster.peers)
        if num_peers and not teachers.follows_peers:
            warnings.warn(
                f"`fit` got a TeacherLoader among {num_peers + 1} groups, but "
                "the model follows no other group. Pass "
                "teachers=tfdistill.teachers.Peers() to CodistillModel, or "
                "leave out the loader.",
                stacklevel=2,
            )
        teachers.start()

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Swaps in what all workers have read, when a refresh is due."""
        super().on_train_batch_end(batch, logs)
        teachers = self.model.teachers
        # Fixed teachers bring no news, but may have to be dropped.
        is_due = self._schedule.due(self.step) or self._waits_for_first
        if len(teachers) and is_due:
            self._refresh()

    def on_train_batch_begin(
        self, batch: int, logs: Logs | None = None
    ) -> None:
        """Waits for the other groups where the burn-in has just ended."""
        super().on_train_batch_begin(batch, logs)
        # By now this group's exporter has seen the same step.
        if self._waits and self._burn_in and self._burn_in.end == self.step > 0:
            self._wait_for_first(self._waits)

    def _wait_for_first(self, waits: wait_for_groups.WaitForGroups) -> None:
        """Publishes this step, and waits for the others' first versions."""
        peers = self.model.teachers.peers
        if not peers.unheard:
            return
        start = time.monotonic()
        limit = max(_LEAST_WAIT_SECS, start - self._began)
        deadline = start + min(limit, waits.limit_secs)
        if self._exporter is not None:
            self._exporter.ensure_published(limit)
        is_over = False
        while not is_over:
            self._refresh()
            is_late = time.monotonic() > deadline
            is_over = is_late or all(map(waits.has_ended, peers.unheard))
            # All workers refresh as often as the chief.
            is_over = bool(self._values.chiefs(is_over))
            if not is_over:
                time.sleep(_LOOK_SECS)
        waits.waited_secs += time.monotonic() - start

    def _refresh(self) -> None:
        """Lets all workers agree on versions, and swaps in what all have."""
        teachers = self.model.teachers
        self._refreshed = self.step
        now, then = time.monotonic(), self._last_time
        self._last_time, self._pause_secs = now, now - then
        generation = teachers.generation
        with self.blocked.measured():
            if teachers.past_moves_at_refreshes:
                # The mean of the moving statistics that replicas keep apart.
                self.model.average_statistics()
            swapped = teachers.refresh(step=self.step)
            self.num_refreshes += len(swapped)
            if teachers.generation != generation:
                self.model.make_train_function(force=True)

    @property
    def _waits_for_first(self) -> bool:
        """Whether the burn-in is just over, and a peer is unheard.

        Groups end theirs at different steps, and publish a version at once.
        """
        if self._burn_in is None or self.step - self._refreshed < _SOON_STEPS:
            return False
        since = self.step - self._burn_in.end
        is_soon = 0 <= since < _SOON_INTERVALS * self._schedule.every_steps
        return is_soon and bool(self.model.teachers.peers.unheard)

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Stops the reading thread; by now the last version is published."""
        self.model.teachers.stop()
        if self._waits:
            self._waits.announce_end()
