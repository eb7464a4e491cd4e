"""The peers of one student: followed in the background, agreed on, swapped."""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from tfdistill.follow import agreement
from tfdistill.follow import follower
from tfdistill.teachers import canary
from tfdistill.teachers import peers as peers_lib
from tfdistill.teachers import teacher as teacher_lib


class FollowedPeers:
    """Moves the peers of all workers of a group alike.

    Whatever changes which version is in use is called on all workers at the
    same step, with the same news.

    Attributes:
        agreement: By which the workers agree; once there is a student.
    """

    agreement: agreement.Agreement

    def __init__(self, teachers: Sequence[teacher_lib.Teacher]) -> None:
        """Takes the teachers, of which it follows the peers."""
        self._peers = [t for t in teachers if isinstance(t, peers_lib.Peer)]
        self._student: teacher_lib.Student | None = None
        self._following: follower.Following | None = None

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[peers_lib.Peer]:
        return iter(self._peers)

    @property
    def unheard(self) -> list[int]:
        """Groups of which no version has come, to be used or refused."""
        followers = [peer.follower for peer in self]
        return [
            each.group
            for each in followers
            if each.current < 0 and not each.rejected
        ]

    @property
    def read_secs(self) -> float:
        """How long reading a version of each peer takes; 0 if unknown."""
        secs = sum(peer.follower.read_secs for peer in self)
        return secs and secs + follower.POLL_SECS

    @property
    def heard_secs(self) -> float:
        """How long the slowest peer takes to get a version, as it reports."""
        return max((peer.arrivals.hears_secs for peer in self), default=0.0)

    def canary_in(self, validation_data: object) -> canary.Canary | None:
        """Returns the canary of those that were given none, if there are."""
        if all(peer.canary is not None for peer in self):
            return None
        return canary.of_validation(validation_data)

    def attached(self, student: teacher_lib.Student) -> None:
        """Takes the student once each peer has been attached to it."""
        self._student = student
        self.agreement = agreement.Agreement(
            student.strategy, [peer.follower for peer in self]
        )

    # ---- in the background ----

    def start(self) -> None:
        """Starts to look for versions, and to compare them."""
        if self._student is None or not self._peers or self._following:
            return
        self.note_student()
        self._following = follower.Following(
            [peer.follower for peer in self],
            proposes=self._student.is_chief,
            also=self._look_further,
        )
        self._following.start()

    def stop(self) -> bool:
        """Stops looking, after a read in progress; whether it did look."""
        following, self._following = self._following, None
        if following is not None:
            following.stop()
        return following is not None

    def _look_further(self) -> None:
        if self._student is not None and self._student.is_chief:
            for held_out in self._student.held_out_losses.values():
                held_out.look()
            for places in {peer.places for peer in self}:
                places.look()

    def note_student(self, step: int | None = None) -> None:
        """Takes the student's values, with which versions are compared."""
        if self._student is not None:
            for held_out in self._student.held_out_losses.values():
                held_out.take_student(step)

    def forget_student(self) -> None:
        """Compares no version with the student until `note_student`."""
        if self._student is not None:
            for held_out in self._student.held_out_losses.values():
                held_out.forget()

    # ---- between steps, on all workers alike ----

    def use(
        self, ready: Sequence[int], step: int | None = None
    ) -> dict[peers_lib.Peer, bool]:
        """Swaps in versions that every worker has read, by the peers' indices.

        Returns which peers use another version now, and whether its graph is
        another one, too.
        """
        wanted = [i for i in ready if self._peers[i].needs_graph]
        loaded = [*ready]
        if wanted:
            # On all workers or on none.
            reasons = {i: self._peers[i].load_graph() for i in wanted}
            usable = self.agreement.confirm(reasons)
            loaded = [i for i in ready if i not in wanted or i in usable]
        return {self._peers[i]: self._peers[i].swap(step) for i in loaded}

    def move(self, groups: Sequence[int]) -> None:
        """Makes each peer follow another group, unless that is -1."""
        for peer, group in zip(self, groups, strict=True):
            if group >= 0:
                peer.follow(group)

    # ---- for a backup ----

    def recall(self, state: Mapping[str, Any]) -> dict[peers_lib.Peer, bool]:
        """Reads the versions of a state again, and waits; returns as `use`."""
        # A version that was good enough then is good enough now.
        self.forget_student()
        wanted = {
            index: peer.recall(state[peer.name])
            for index, peer in enumerate(self)
            if peer.name in state
        }
        return self.use(self.agreement.read(wanted)) if self._peers else {}
