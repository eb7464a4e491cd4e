"""Whether a version of a peer is clearly worse than the student, on a canary.

Both predict the same labelled canary batch. What teachers are worth without a
canary: `on_batches`.
"""

import functools
import logging
from collections.abc import Callable
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
_WORSE = "on the canary batch, it is clearly worse than the student."


class Merit:
    """Compares the versions of peers with the student, on the chief.

    The training thread takes the student's values; the thread that reads
    versions finds all losses, the student's once for all peers.

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
        self._own: Callable[[], tuple[np.ndarray, float] | None] = lambda: None

    def take(self) -> None:
        """Takes the student's values; their loss is found if somebody asks."""
        if self.can_compare:
            self._own = functools.cache(
                functools.partial(self._student_losses, self._writer.snapshot())
            )

    def check(self, peer: str, outputs: list[tf.Tensor]) -> None:
        """Refuses a version with these outputs if it is clearly worse.

        Models with batch normalization may be much worse for the time of one
        version: the losses of the peer's version before are averaged in.
        """
        found = self._own()
        if found is None:
            return
        losses, (own, base) = self._losses(outputs[0]), found
        before = self._before.get(peer, losses)
        self._before[peer] = losses
        least = min(losses, (losses + before) / 2, key=np.mean)
        if not _is_worse(least, own, base):
            self._good[peer] = losses
            self.outgrown.pop(peer, None)
            return
        if _is_worse(self._good.get(peer, own), own, base):
            self.outgrown[peer] = _WORSE
        raise screen.Refused(_WORSE)


def _is_worse(losses: np.ndarray, own: np.ndarray, base: float) -> bool:
    error = np.std(losses - own) / len(own) ** 0.5
    means = float(np.mean(losses)), float(np.mean(own))
    return yardstick.is_worse(*means, base, float(error))
