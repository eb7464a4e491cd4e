"""Whether a teacher may count: its task loss beside the student's own.

Both are of the same rows: held-out ones if the student has some, where a
version is compared with the student at the version's own step, and otherwise
rows of the batches. A teacher that is clearly worse waits until it is better;
it is still asked. There is no verdict while the student's own loss falls
steeply, nor with several outputs or without a single task loss.
"""

import logging
import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistill.exports import saved_model
from tfdistill.teachers import canary as canary_lib
from tfdistill.teachers import yardstick as yardstick_lib

_log = logging.getLogger(__name__)
# A model is worse if it surely saves less than this share of what the student
# saves of a guess's loss. On digits an honest peer has 0.98 of it, and one that
# learns from labels of which half are wrong 0.58 to 0.77. Of clicks, where
# little is saved, honest peers have less by chance: hence the standard errors.
_LEAST_SHARE, _NUM_ERRORS = 0.9, 2.0
# On rows that the student has learned by heart, an honest peer may save 0.3 of
# it. One that has made half a model of its student must save more to count
# again.
_SOME_SHARE, _MOST_OF_IT = 0.15, 0.75
# A student that saves less than this share of a guess's loss is no yardstick;
# a model whose loss is so many times that of the guess needs none.
_LEAST_SKILL, _WORSE_THAN_GUESS = 0.05, 1.5
# A student that has saved so much of its loss is falling steeply: what another
# group had at the time says little. How many of its losses are kept.
_STEEP, _NUM_KEPT = 0.1, 200
# The last reports are pooled: so many, and more of small batches. Fewer
# predictions say nothing, and few reports must be surer.
_NUM_REPORTS, _FEW_REPORTS, _LEAST_PREDICTIONS = 5, 2, 64
_NOT_COMPARED = (
    "Teachers are not compared with the student, because the task loss cannot "
    "be computed outside a step: %s"
)
_MAY_BE_BAD = (
    "The teacher %s may be bad: %s Either the student has memorized these "
    "examples, or the teacher has learned something else. Pass "
    "`validation_data` to `fit`, to compare them on that data."
)


def is_worse(
    theirs: float,
    own: float,
    base: float,
    error: float,
    *,
    least_share: float = _LEAST_SHARE,
    num_errors: float = _NUM_ERRORS,
) -> bool:
    """Whether a mean loss is clearly worse than the student's `own`.

    `base` is that of the guess, and `error` the standard error of the mean
    difference by prediction.
    """
    saved = base - own
    if saved < _LEAST_SKILL * base:
        return theirs > _WORSE_THAN_GUESS * base > 0
    return theirs - own - num_errors * error > (1 - least_share) * saved


class OwnLosses:
    """The student's losses by its steps, and those of a guess beside them."""

    def __init__(self) -> None:
        """Knows none yet."""
        # Steps, ascending; the losses of each prediction; the guess's mean.
        self._known: list[tuple[int, np.ndarray, float]] = []

    def note(self, step: int, losses: np.ndarray, base: float) -> None:
        """Keeps the losses at a step, and the guess's mean loss."""
        earlier = [each for each in self._known if each[0] < step]
        self._known = [*earlier, (step, losses, base)][-_NUM_KEPT:]

    def at(self, step: int) -> tuple[int, np.ndarray, float]:
        """Returns what was noted last by a step, or else first of all."""
        before = [each for each in self._known if each[0] <= step]
        return before[-1] if before else self._known[0]

    def fall_since(self, step: int) -> bool:
        """Whether they have fallen steeply since a step."""
        then, now = self.at(step)[1], self._known[-1][1]
        return float(np.mean(now)) < (1 - _STEEP) * float(np.mean(then))

    def __bool__(self) -> bool:
        return bool(self._known)


class HeldOut:
    """Compares versions with the student on held-out rows, on the chief.

    The training thread takes the student's values; the thread that reads
    versions finds all losses, the student's once for all peers.

    Attributes:
        can_compare: Whether the rows have labels that the task loss takes.
    """

    def __init__(self, canary: canary_lib.Canary, student: Any) -> None:
        """Traces the student: the other thread must not run its code."""
        self._targets, self._inputs = canary.targets, canary.inputs
        self._writer = saved_model.SavedModelWriter(student.graph)
        graph = student.graph
        self._run = (
            student.remote.runner(graph)
            if student.on_servers
            else lambda *given: keras.tree.flatten(graph(*given))
        )
        self._yardstick: Any = student.yardstick
        self.forget()
        self.can_compare = False
        if self._targets is not None and self._yardstick is not None:
            try:
                guess = self._student(self._writer.snapshot())[1]
                self.can_compare = bool(np.isfinite(guess))
            except Exception as error:  # Losses raise whatever they like.
                _log.warning(_NOT_COMPARED, error)

    def losses(self, output: Any) -> np.ndarray:
        """Returns the loss of each prediction of an output."""
        return self._yardstick.losses(self._targets, output).numpy()

    def _student(self, values: saved_model.Snapshot) -> tuple[Any, float]:
        (output,) = self._run(values, self._inputs)
        guess = self.losses(self._yardstick.guess(output))
        return self.losses(output), float(np.mean(guess))

    def forget(self) -> None:
        """Compares nothing until `take`."""
        self._taken: tuple[int, saved_model.Snapshot] | None = None
        self.own = OwnLosses()

    def take(self, step: int | None = None) -> None:
        """Takes the student's values, at a step of its own, for `look`."""
        if self.can_compare:
            self._taken = step or 0, self._writer.snapshot()

    def look(self) -> None:
        """Finds the losses of the values that were taken last, once."""
        taken, self._taken = self._taken, None
        if taken is not None:
            self.own.note(taken[0], *self._student(taken[1]))

    def doubt(self, losses: np.ndarray, step: int, *, since: int) -> str:
        """Returns why a version is worse than the student at a step, or "".

        Nothing is said if the student's loss falls steeply from `since` on.
        """
        if not self.own or self.own.fall_since(since):
            return ""
        at, own, base = self.own.at(step)
        error = np.std(losses - own) / len(own) ** 0.5
        means = float(np.mean(losses)), float(np.mean(own)), base
        if not is_worse(*means, float(error)):
            return ""
        return (
            f"its loss on the held-out batch is {means[0]:.3g}, clearly worse "
            f"than the student's at step {at}, {means[1]:.3g}; base rates have "
            f"a loss of {base:.3g}."
        )


class Reports:
    """Compares on rows of the batches, as steps report them, on the chief.

    Attributes:
        own: The student's mean losses on them.
    """

    def __init__(self, yardstick: yardstick_lib.Yardstick) -> None:
        """Traces nothing yet."""
        self._yardstick, self.own = yardstick, OwnLosses()
        self._find = tf.function(self._losses, reduce_retracing=True)
        self._has_failed = False

    def _losses(self, labels: Any, outputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """Of the guess, the student and its teachers: `[2 + teachers, n]`."""
        given = self._yardstick.guess(outputs[0]), *outputs
        return tf.stack([self._yardstick.losses(labels, o) for o in given])

    def read(
        self,
        report: Sequence[Any],
        teachers: Sequence[Any],
        wanted: np.ndarray,
        step: int,
    ) -> None:
        """Adds a step's report to the records of the teachers that are wanted.

        `report` is as `rows.reported` returns it, `wanted` bool `[teachers]`.
        """
        asked, labels, *outputs = report
        wanted = wanted & (np.asarray(asked) > 0)
        end = 1 + len(teachers)
        try:
            guess, own, *theirs = self._find(labels, outputs[:end]).numpy()
        except Exception as error:  # Of a loss that the user has written.
            if not self._has_failed:
                _log.warning(_NOT_COMPARED, error)
            self._has_failed = True
            return
        counted = np.isfinite(guess + own)
        for each in outputs[end:]:
            # Some losses have one value for all.
            if len(counted) % np.size(each) == 0:
                counted &= np.repeat(each, len(counted) // np.size(each)) > 0
        if counted.any():
            self.own.note(step, own[counted], float(guess[counted].mean()))
        for index, teacher in enumerate(teachers):
            known = counted & np.isfinite(theirs[index])
            if not wanted[index] or not known.any():
                continue
            version = teacher.standing().step
            teacher.record.add(
                *(losses[known] for losses in (theirs[index], own, guess)),
                falls=version >= 0 and self.own.fall_since(version),
            )


class Record:
    """What the steps before the last refreshes said of one teacher."""

    def __init__(self, reports: Sequence[Sequence[float]] = ()) -> None:
        """Takes the `reports` of a backup, or knows nothing yet."""
        # Of each: how many predictions, the sums of the losses of the teacher,
        # the student and the guess, and that of the squares of the differences
        # of the first two.
        self.reports = np.reshape(np.array(reports, float), [-1, 5])
        self._falls = self._has_warned = False

    def add(self, *losses: np.ndarray, falls: bool) -> None:
        """Takes a report: losses of the teacher, the student, the guess.

        `falls` is whether the student's are falling steeply.
        """
        theirs, own, _ = losses
        sums = [len(own), *map(np.sum, losses), np.sum((theirs - own) ** 2)]
        self._falls, self.reports = falls, np.array([*self.reports, sums])
        later = self.reports[1:]
        enough = later[:, 0].sum() >= _LEAST_PREDICTIONS
        if len(later) >= _NUM_REPORTS and enough:
            self.reports = later

    def _means(self) -> tuple[float, np.ndarray]:
        """Returns the number of predictions, and the means of the others."""
        count, *sums = self.reports.sum(axis=0)
        return count, np.array(sums) / max(count, 1)

    def status(self) -> dict[str, float | None]:
        """Returns the mean losses, for logs; None if they are not known."""
        count, means = self._means()
        names = "teacher_loss", "own_loss", "base_loss"
        return {
            name: float(mean) if count else None
            for name, mean in zip(names, means, strict=False)
        }

    def doubt(self, name: str, before: str, *, is_late: bool = False) -> str:
        """Returns why the teacher may not count, "" if it may.

        That is `before`, if there is no verdict. A teacher that `is_late`, with
        no newer version in sight, must save as much as on held-out rows. From
        one that is not, so little is a reason to warn only: the student may
        have learned these rows by heart.
        """
        count, (theirs, own, base, square) = self._means()
        if count < _LEAST_PREDICTIONS or (self._falls and not is_late):
            return before
        error = math.sqrt(max(0.0, square - (theirs - own) ** 2) / count)
        means = theirs, own, base, error
        text = (
            f"on the student's batches, its loss is {theirs:.3g}, the "
            f"student's {own:.3g}; base rates have a loss of {base:.3g}."
        )
        is_bad = is_worse(
            *means,
            least_share=_MOST_OF_IT if before else _SOME_SHARE,
            num_errors=float(len(self.reports) <= _FEW_REPORTS),
        )
        if is_bad or (is_late and is_worse(*means)):
            return text
        if is_worse(*means, least_share=_MOST_OF_IT) and not self._has_warned:
            _log.warning(_MAY_BE_BAD, name, text)
            self._has_warned = True
        return ""
