"""What happens to a student's teachers between its steps, on all workers."""

import logging
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdistill import agreement
from tfdistill import chief_only
from tfdistill import peer_reader
from tfdistill import remote_teachers
from tfdistill import soft_targets
from tfdistill import teacher_options
from tfdistill import teacher_slot

_log = logging.getLogger(__name__)


class TeacherRefresh:
    """Reads versions in the background and swaps in what all workers have.

    Attributes:
        generation: Counts loaded graphs: the training step is traced anew for
            each.
    """

    def __init__(
        self,
        options: teacher_options.TeacherOptions,
        slots: Sequence[teacher_slot.TeacherSlot],
        strategy: tf.distribute.Strategy,
        *,
        state: soft_targets.TeacherState,
        remote: remote_teachers.RemoteTeachers | None,
    ) -> None:
        """Starts nothing yet.

        Args:
            options: Of the teachers.
            slots: Their places, in the same order on all workers.
            strategy: The strategy that the student trains under.
            state: What the training step reads of the teachers.
            remote: What a parameter-server group does otherwise; None in any
                other.
        """
        self._options = options
        self._slots = slots
        self._strategy = strategy
        self._state = state
        self._remote = remote
        self._decisions = agreement.Decisions(
            strategy, slots, remote or self._agreement()
        )
        self._poller: peer_reader.Poller | None = None
        self._published: Any = None
        self.generation = 0
        self._publish_state()

    def _agreement(self) -> agreement.Agreement:
        most = self._options.max_bad_batches
        return agreement.Agreement(
            self._strategy,
            lambda: self._state.bad_in_a_row() >= most,
            size=agreement.NUM_FIELDS * len(self._slots),
        )

    def start(self) -> None:
        """Starts to look for versions in the background."""
        if self._options.peers and self._poller is None:
            self._poller = peer_reader.Poller(
                [slot.reader for slot in self._slots if slot.reader],
                chief_only.is_chief(self._strategy),
                self._options.poll_secs,
            )
            self._poller.start()

    def stop(self) -> None:
        """Stops looking; waits for a read in progress, 30 s at most."""
        if self._poller is not None:
            self._poller.stop()
            self._poller = None

    def refresh(self, step: int | None) -> list[str]:
        """See `TeacherSet.refresh`."""
        for slot in self._slots:
            slot.note_news()
        ready = self._decisions.drop_bad(
            "its outputs were NaN or infinite in "
            f"{self._options.max_bad_batches} batches in a row."
        )
        ready = self._decisions.load_graphs(ready)
        self._swap(ready)
        if step is not None:
            for slot in self._slots:
                slot.health.note_step(step)
        return [slot.name for slot in ready]

    def versions(self) -> dict[int, int]:
        """See `TeacherSet.versions`."""
        by_name = {slot.name: slot for slot in self._slots if slot.in_use}
        return {
            group: by_name[name].step if name in by_name else -1
            for group, name in self._options.names_of_peers.items()
        }

    def load_versions(self, wanted: Mapping[int, int]) -> dict[int, int]:
        """See `TeacherSet.load_versions`."""
        names = self._options.names_of_peers
        unknown = sorted(set(wanted) - set(names))
        if unknown:
            _log.warning("Groups %s are no teachers any more.", unknown)
        # The reading thread may be at another version.
        was_running = self._poller is not None
        self.stop()
        ready = self._decisions.read(
            {names[g]: step for g, step in wanted.items() if g in names}
        )
        self._swap(ready)
        if was_running:
            self.start()
        return self.versions()

    def _swap(self, slots: Sequence[teacher_slot.TeacherSlot]) -> None:
        for slot in slots:
            self.generation += slot.swap()
        if self._remote and slots:
            self._remote.swapped()
        self._publish_state()

    def _publish_state(self) -> None:
        if self._remote:
            # Travels with each execution.
            return
        steps = [slot.step for slot in self._slots]
        in_use = [slot.in_use for slot in self._slots]
        shares = [slot.health.share_by_secs for slot in self._slots]
        if (steps, in_use, shares) != self._published:
            self._state.assign(steps=steps, in_use=in_use, shares=shares)
            self._published = (steps, in_use, shares)
