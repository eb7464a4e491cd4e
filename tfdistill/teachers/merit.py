"""Whether a version of a peer is clearly worse than the student: the one rule.

Both predict the same labelled canary batch. The skill of a model is the share
of the loss of base rates that it saves: 0 for whoever knows only how often
each class occurs, or the mean, and 1 without any loss. Skills compare across
data sets; losses do not. What teachers are worth without a canary:
`on_batches`.
"""

import functools
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from tfdistill.exports import saved_model
from tfdistill.follow import screen
from tfdistill.teachers import canary as canary_lib
from tfdistill.teachers import on_servers
from tfdistill.teachers import teacher

# A version is worse if it surely has less than this share of the student's
# skill. On digits an honest peer has 0.98 of it, and one that learns from
# labels of which half are wrong 0.58 to 0.77, which a student that learns from
# it makes more. Of clicks, where skills are small, honest peers have less by
# chance: hence so many standard errors of the differences by example.
LEAST_SHARE, _NUM_ERRORS = 0.9, 2.0
# A student with less skill than this is no yardstick; a version whose loss is
# so many times that of base rates needs none.
LEAST_SKILL, _WORSE_THAN_BASE = 0.05, 1.5
_WORSE = "on the canary batch, it is clearly worse than the student."
_Losses = np.ndarray


class Merit:
    """Compares the versions of peers with the student, on the chief.

    The training thread takes the student's values; the thread that reads
    versions finds all losses, the student's once for all peers. Labels are
    class indices, 0 and 1, one-hot rows, or the numbers of a regression.

    Attributes:
        can_compare: Whether the canary has labels of these kinds.
        outgrown: By peer, why its version in use should not count: it is worse
            by now, and so is its next one.
    """

    def __init__(
        self, canary: canary_lib.Canary, student: teacher.Student
    ) -> None:
        """Traces the student: the other thread must not run its code."""
        graph, inputs = student.graph, canary.inputs
        self._writer = saved_model.SavedModelWriter(graph)
        self._run = (
            on_servers.student_runner(graph, inputs)
            if student.on_servers
            else lambda values: keras.tree.flatten(graph(values, inputs))
        )
        outputs = self._run(self._writer.snapshot())
        self._yardstick = canary_lib.Yardstick(canary.targets, student, outputs)
        self.can_compare = self._yardstick.losses(outputs) is not None
        # By peer, of its last version, and of the last that was good enough.
        self._before: dict[str, _Losses] = {}
        self._good: dict[str, _Losses] = {}
        self.outgrown: dict[str, str] = {}
        self.forget()

    def forget(self) -> None:
        """Compares nothing until `take`."""
        self._own: Callable[[], _Losses | None] = lambda: None

    def take(self) -> None:
        """Takes the student's values; their loss is found if somebody asks."""
        values = self._writer.snapshot()
        find = self._yardstick.losses
        self._own = functools.cache(lambda: find(self._run(values)))

    def check(self, peer: str, outputs: list[tf.Tensor]) -> None:
        """Refuses a version with these outputs if it is clearly worse.

        Models with batch normalization may be much worse for the time of one
        version: the losses of the peer's version before are averaged in.
        """
        losses, own = self._yardstick.losses(outputs), self._own()
        if losses is None or own is None:
            return
        before = self._before.get(peer, losses)
        self._before[peer] = losses
        least = min(losses, (losses + before) / 2, key=np.mean)
        if not is_worse(least, own, self._yardstick.base):
            self._good[peer] = losses
            self.outgrown.pop(peer, None)
            return
        if is_worse(self._good.get(peer, own), own, self._yardstick.base):
            self.outgrown[peer] = _WORSE
        raise screen.Refused(_WORSE)


def is_worse(losses: _Losses, own: _Losses, base: float) -> bool:
    """Whether losses are clearly worse than the student's `own`.

    By example, beside those of base rates.
    """
    saved = base - np.mean(own)
    if saved < LEAST_SKILL * base:
        return bool(np.mean(losses) > _WORSE_THAN_BASE * base > 0)
    differences = losses - own
    error = np.std(differences) / len(differences) ** 0.5
    surely = np.mean(differences) - _NUM_ERRORS * error
    return bool(surely > (1 - LEAST_SHARE) * saved)
