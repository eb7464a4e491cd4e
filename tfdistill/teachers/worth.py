"""Whether a teacher may count: its task loss beside the student's own.

Both are of the same rows: held-out ones if the student has some, where a
version is compared with the student at the version's own step, and otherwise
rows of the batches. A teacher that is clearly worse waits until it is better;
it is still asked. While the student's own loss falls steeply, it waits only if
it knows less than a guess. With several outputs or losses there is no verdict.
"""

import logging
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistill.exports import saved_model
from tfdistill.teachers import canary as canary_lib

_log = logging.getLogger(__name__)
# Where these come from: docs/internals/bad_peers.md.
# A model is worse if it surely saves less than this share of what the student
# saves of a guess's loss.
_LEAST_SHARE, _NUM_ERRORS = 0.9, 2.0
# On rows that the student may have learned by heart, so little is enough. One
# that has made half a model of its student must save more to count again.
_SOME_SHARE, _MOST_OF_IT = 0.15, 0.75
# Beside a student that saves less than this share of a guess's loss, a model is
# worse if its loss is so many times the guess's loss, and surely above its own.
_LEAST_SKILL, _WORSE_THAN_GUESS = 0.05, 1.5
# A student that has saved so much of its loss is falling steeply: what another
# group had at the time says little. How many of its losses are kept; the last.
_STEEP, _NUM_KEPT, _LAST = 0.1, 200, 2**62
# The last reports are pooled: so many, and more of small batches. Fewer
# predictions say nothing, and few reports must be surer.
_NUM_REPORTS, _FEW_REPORTS, _LEAST_COUNT = 5, 2, 64
NOT_COMPARED = (
    "Teachers aren't compared, as the task loss fails outside a step: %s"
)
_MAY_BE_BAD = (
    "The teacher %s may be bad: %s Or the student has memorized these rows. "
    "Pass `validation_data` to `fit` to find out."
)


def is_worse(
    theirs: float,
    own: float,
    base: float,
    error: float,
    least_share: float = _LEAST_SHARE,
    num_errors: float = _NUM_ERRORS,
) -> bool:
    """Whether a mean loss is worse; `theirs - own` has the error `error`."""
    saved, surely = base - own, theirs - own - num_errors * error
    if saved < _LEAST_SKILL * base:
        return surely > 0 and theirs > _WORSE_THAN_GUESS * base > 0
    return surely > (1 - least_share) * saved


class OwnLosses:
    """The student's losses by step, and a guess's losses for comparison."""

    def __init__(self) -> None:
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
        return bool(np.mean(now) < (1 - _STEEP) * np.mean(then))

    def __bool__(self) -> bool:
        return bool(self._known)


class HeldOut:
    """Compares versions with the student on held-out rows, on the chief.

    The training thread takes the student's values; the thread that reads
    versions finds all losses, the student's once for all peers.
    """

    def __init__(self, canary: canary_lib.Canary, student: Any) -> None:
        """Traces the student: the other thread must not run its code."""
        graph, remote = student.graph, student.remote
        self._targets, self._inputs = canary.targets, canary.inputs
        self._writer = saved_model.SavedModelWriter(graph)
        self._run = remote.runner(graph) if student.on_servers else graph
        self._scorer: Any = student.scorer
        # Whether the rows have labels that the task loss takes.
        self.can_compare = self._targets is not None and bool(self._scorer)
        self.forget()
        self.take_student()
        try:
            self.look()
        except Exception as error:  # Losses raise whatever they like.
            _log.warning(NOT_COMPARED, error)
        self.can_compare = bool(self.own and np.isfinite(self.own.at(0)[2]))
        self.forget()

    def losses(self, output: tf.Tensor) -> np.ndarray:
        """Returns the loss of each prediction of an output."""
        return self._scorer.losses(self._targets, output).numpy()

    def forget(self) -> None:
        """Compares nothing until `take_student`."""
        self._taken: tuple[int, saved_model.Snapshot] | None = None
        self.own = OwnLosses()

    def take_student(self, step: int | None = None) -> None:
        """Takes the student's values, at the student's step, for `look`."""
        if self.can_compare:
            self._taken = step or 0, self._writer.snapshot()

    def look(self) -> None:
        """Finds the losses of the values that were taken last, once."""
        taken, self._taken = self._taken, None
        if taken is not None:
            step, values = taken
            (output,) = keras.tree.flatten(self._run(values, self._inputs))
            guess = self.losses(self._scorer.guess(output))
            self.own.note(step, self.losses(output), float(np.mean(guess)))

    def doubt(self, losses: np.ndarray, step: int, *, since: int) -> str:
        """Returns why a version is worse than the student at a step, or ""."""
        if not self.own:
            return ""
        falls = self.own.fall_since(since)
        at, own, base = self.own.at(_LAST if falls else step)
        error = np.std(losses - own) / len(own) ** 0.5
        means = float(np.mean(losses)), float(np.mean(own)), base
        if not is_worse(*means, float(error), 0.0 if falls else _LEAST_SHARE):
            return ""
        return (
            f"its loss on the held-out batch is {means[0]:.3g}, clearly worse "
            f"than the student's at step {at}, {means[1]:.3g}; base rates have "
            f"a loss of {base:.3g}."
        )


class VersionLosses:
    """What one peer's versions lose on held-out rows, beside the student."""

    def __init__(self, held_out: HeldOut) -> None:
        self._held_out = held_out
        self.forget()

    def forget(self) -> None:
        """Knows no version yet."""
        self._known: dict[int, np.ndarray] = {}
        # The newest that was worse than the student.
        self._worse_step = -1

    def doubt_new(self, output: tf.Tensor, step: int, *, in_use: int) -> str:
        """Returns why a version is worse than the student was then, or "".

        Models with batch normalization may be much worse for the time of one
        version: the previous version's losses are averaged in.
        """
        losses, known = self._held_out.losses(output), self._known
        before = known[max(known)] if known else losses
        least = min(losses, (losses + before) / 2, key=np.mean)
        kept = {in_use: known[in_use]} if in_use in known else {}
        self._known = {**kept, step: losses}
        self._held_out.look()
        why = self._held_out.doubt(least, step, since=step)
        if why:
            self._worse_step = step
        return why

    def doubt(self, in_use: int, now: int, since: int, *, is_late: bool) -> str:
        """Returns why the version in use is worse than the student is now.

        Only once there is no better one: the next is late, or was worse.
        """
        has_better = not is_late and self._worse_step <= in_use
        if in_use not in self._known or has_better:
            return ""
        return self._held_out.doubt(self._known[in_use], now, since=since)


class Score:
    """What the steps before the last refreshes reported on one teacher."""

    def __init__(self, reports: Sequence[Sequence[float]] = ()) -> None:
        """Takes the `reports` of a backup, or knows nothing yet."""
        # In each report: how many predictions; sums of the losses of teacher,
        # student and guess, and of the first two's squared differences.
        self.reports = np.reshape(np.array(reports, float), [-1, 5])
        self._falls = self._has_warned = False

    def add(self, *losses: np.ndarray, falls: bool) -> None:
        """Takes losses of the teacher, the student and the guess."""
        known = np.stack(losses)[:, np.isfinite(losses[0])]
        square = np.sum((known[0] - known[1]) ** 2)
        sums = [known.shape[1], *known.sum(axis=1), square]
        self._falls, self.reports = falls, np.array([*self.reports, sums])
        later = self.reports[1:]
        if len(later) >= _NUM_REPORTS and later[:, 0].sum() >= _LEAST_COUNT:
            self.reports = later

    def _means(self) -> list[float]:
        """Returns the number of predictions, and the means of the others."""
        count, *sums = self.reports.sum(axis=0).tolist()
        return [count, *(each / max(count, 1) for each in sums)]

    def status(self) -> dict[str, float | None]:
        """Returns the mean losses, for logs; None if they are not known."""
        count, *means = self._means()
        names = "teacher_loss", "own_loss", "base_loss"
        return dict(zip(names, means if count else [None] * 3, strict=False))

    def doubt(self, name: str, before: str, *, is_late: bool = False) -> str:
        """Returns why the teacher may not count; `before` without a verdict."""
        count, theirs, own, base, square = self._means()
        if count < _LEAST_COUNT:
            return before
        error = max(0.0, square - (theirs - own) ** 2) ** 0.5 / count**0.5
        means = theirs, own, base, error
        text = (
            f"on the student's batches, its loss is {theirs:.3g}, the "
            f"student's {own:.3g}; base rates have a loss of {base:.3g}."
        )
        if self._falls and not is_late:
            return text if is_worse(*means, 0.0) else before
        least_share = _MOST_OF_IT if before else _SOME_SHARE
        few = float(len(self.reports) <= _FEW_REPORTS)
        is_bad = is_worse(*means, least_share, num_errors=few)
        # Nothing newer is in sight of one that is late.
        if is_bad or (is_late and is_worse(*means)):
            return text
        if is_worse(*means, _MOST_OF_IT) and not self._has_warned:
            _log.warning(_MAY_BE_BAD, name, text)
            self._has_warned = True
        return ""
