"""Whether a version of a peer is clearly worse than the student, on a canary.

Both predict the same labelled canary batch, and are compared at the same step:
a version is some steps old, and while losses fall steeply it would be worse
than the student is *now*, however good its group. What teachers are worth
without a canary: `on_batches`.
"""

import logging
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistill.exports import saved_model
from tfdistill.follow import screen
from tfdistill.teachers import canary as canary_lib
from tfdistill.teachers import on_servers
from tfdistill.teachers import teacher
from tfdistill.teachers import yardstick

_log = logging.getLogger(__name__)
# A student that has saved so much of its loss since the version's step is
# falling steeply: what another group has at that step says little.
_STEEP = 0.1
# How many of the student's losses are kept, the newest.
_NUM_KEPT = 200


class Merit:
    """Compares the versions of peers with the student, on the chief.

    The training thread takes the student's values; the thread that reads
    versions finds all losses, the student's once for all peers, and keeps them
    by step.

    Attributes:
        can_compare: Whether the canary has labels that the task loss takes.
        outgrown: By peer, why its version in use should not count: it is worse
            by now, and so is its next one.
    """

    def __init__(
        self, canary: canary_lib.Canary, student: teacher.Student
    ) -> None:
        """Traces the student: the other thread must not run its code."""
        graph, inputs = student.graph, canary.inputs
        self._targets = canary.targets
        self._writer = saved_model.SavedModelWriter(graph)
        self._run = (
            on_servers.student_runner(graph)
            if student.on_servers
            else lambda *given: keras.tree.flatten(graph(*given))
        )
        self._inputs = inputs
        self._yardstick: Any = student.yardstick
        self.can_compare = self._can_compare()
        # By peer, of its last version, and of the last that was good enough.
        self._before: dict[str, np.ndarray] = {}
        self._good: dict[str, np.ndarray] = {}
        self.outgrown: dict[str, str] = {}
        self.forget()

    def _can_compare(self) -> bool:
        if self._targets is None:
            return False
        why = "there is no one task loss."
        if self._yardstick is not None:
            try:
                _, base = self._student_losses(self._writer.snapshot())
                if np.isfinite(base):
                    return True
                why = "they give no finite loss."
            except Exception as error:  # Losses raise whatever they like.
                why = str(error)
        _log.warning(
            "To compare teachers with the student, it must have one output and "
            "a task loss that takes the labels of held-out examples. Versions "
            "are not compared: %s",
            why,
        )
        return False

    def _losses(self, output: tf.Tensor) -> np.ndarray:
        return self._yardstick.losses(self._targets, output).numpy()

    def _student_losses(
        self, values: saved_model.Snapshot
    ) -> tuple[np.ndarray, float]:
        (output,) = self._run(values, self._inputs)
        guess = self._losses(self._yardstick.guess(output))
        return self._losses(output), float(np.mean(guess))

    def forget(self) -> None:
        """Compares nothing until `take`."""
        self._taken: tuple[int, saved_model.Snapshot] | None = None
        self._looked_at: Any = None
        # Steps, ascending; the losses of each prediction; the guess's mean.
        self._own: list[tuple[int, np.ndarray, float]] = []

    def take(self, step: int | None = None) -> None:
        """Takes the student's values, at a step of its own, for `look`."""
        if self.can_compare:
            self._taken = step or 0, self._writer.snapshot()

    def look(self) -> None:
        """Finds the losses of the values that were taken last."""
        taken = self._taken
        if taken is None or taken is self._looked_at:
            return
        self._looked_at = taken
        step, values = taken
        self.note(step, *self._student_losses(values))

    def note(self, step: int, losses: np.ndarray, base: float) -> None:
        """Keeps the student's losses at a step, and the guess's mean loss."""
        earlier = [each for each in self._own if each[0] < step]
        self._own = [*earlier, (step, losses, base)][-_NUM_KEPT:]

    def _at(self, step: int) -> tuple[int, np.ndarray, float]:
        """The student's losses when it was last looked at by a step."""
        before = [each for each in self._own if each[0] <= step]
        return before[-1] if before else self._own[0]

    def check(self, peer: str, outputs: list[tf.Tensor], *, step: int) -> None:
        """Refuses a version of a step if it is clearly worse by its outputs.

        Models with batch normalization may be much worse for the time of one
        version: the losses of the peer's version before are averaged in.
        """
        self.look()
        if not self._own:
            return
        losses, (at, own, base) = self._losses(outputs[0]), self._at(step)
        before = self._before.get(peer, losses)
        self._before[peer] = losses
        least = min(losses, (losses + before) / 2, key=np.mean)
        now = float(np.mean(self._own[-1][1]))
        is_steep = now < (1 - _STEEP) * float(np.mean(own))
        if is_steep or not _is_worse(least, own, base):
            self._good[peer] = losses
            self.outgrown.pop(peer, None)
            return
        why = (
            f"on the canary batch, its loss is {np.mean(least):.3g}, clearly "
            f"worse than the student's at step {at}, {np.mean(own):.3g}; that "
            f"of base rates is {base:.3g}."
        )
        if _is_worse(self._good.get(peer, own), own, base):
            self.outgrown[peer] = why
        raise screen.Refused(why)


def _is_worse(losses: np.ndarray, own: np.ndarray, base: float) -> bool:
    error = np.std(losses - own) / len(own) ** 0.5
    means = float(np.mean(losses)), float(np.mean(own))
    return yardstick.is_worse(*means, base, float(error))
