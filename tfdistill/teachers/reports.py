"""What steps report on the teachers, read between two steps."""

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistill.teachers import rows as rows_lib
from tfdistill.teachers import teacher as teacher_lib
from tfdistill.teachers import term as term_lib
from tfdistill.teachers import worth

_log = logging.getLogger(__name__)


class Reports:
    """Notes on each teacher what the steps before a refresh reported on it.

    Losses, of rows of the batches, are compared on the chief only.
    """

    def __init__(
        self,
        teachers: Sequence[teacher_lib.Teacher],
        student: teacher_lib.Student,
    ) -> None:
        """Traces nothing yet."""
        self._teachers, self._last = teachers, student.last
        self._scorer: Any = student.scorer if student.is_chief else None
        self._own = worth.OwnLosses()
        self._find = tf.function(self._losses, reduce_retracing=True)
        self._has_failed = False
        # The last step's report.
        self._seen: Any = None
        self.show_loss(math.nan)

    def read(self, step: int) -> None:
        """Looks at what the last step reported on the versions in use."""
        last = self._last
        rows, versions = map(last.detail, (term_lib.TAUGHT, term_lib.VERSIONS))
        if rows is None or versions is None or rows is self._seen:
            return
        self._seen, shares = rows, np.asarray(rows[0])
        standings = [each.standing().step for each in self._teachers]
        in_use = np.asarray(versions[0]) == standings
        report = last.detail(rows_lib.REPORT)
        if report and self._scorer:
            indices = map(int, np.flatnonzero(in_use))
            wanted = {index: self._teachers[index] for index in indices}
            self._compare(report, wanted, step)
        for index in map(int, np.flatnonzero(in_use & ~np.isnan(shares))):
            self._teachers[index].note_taught(float(shares[index]))

    def mean_loss(self) -> float:
        """The mean task loss of the teachers in use; NaN for none.

        Only the chief's is known.
        """
        found = [
            each.score.status()["teacher_loss"]
            for each in self._teachers
            if each.standing().share
        ]
        known = [loss for loss in found if loss is not None]
        return float(np.float32(np.mean(known) if known else np.nan))

    def show_loss(self, loss: float) -> None:
        """Logs a loss beside the losses of steps from now on."""
        self._last.also["teacher_loss"] = loss

    def _losses(
        self, labels: tf.Tensor, outputs: Sequence[tf.Tensor]
    ) -> tf.Tensor:
        """Losses of the guess, student and teachers: `[2 + teachers, n]`."""
        given = self._scorer.guess(outputs[0]), *outputs
        return tf.stack([self._scorer.losses(labels, o) for o in given])

    def _compare(
        self, report: Sequence[tf.Tensor], wanted: dict[int, Any], step: int
    ) -> None:
        """Adds what `rows.reported` returned to teachers' records, by index."""
        asked, labels, *outputs = report
        end = 1 + len(asked)
        try:
            losses = self._find(labels, outputs[:end]).numpy()
        except Exception as error:  # From a loss that the user wrote.
            if not self._has_failed:
                _log.warning(worth.NOT_COMPARED, error)
            self._has_failed = True
            return
        for weights in outputs[end:]:
            # Some losses have one value for all.
            times, rest = divmod(losses.shape[1], np.size(weights))
            if not rest:
                losses[:, np.repeat(weights, times) <= 0] = np.nan
        losses = losses[:, np.isfinite(losses[:2]).all(axis=0)]
        if not losses.size:
            return
        guess, own, *theirs = losses
        self._own.note(step, own, float(guess.mean()))
        for index, teacher in wanted.items():
            version = teacher.standing().step
            falls = version >= 0 and self._own.fall_since(version)
            if asked[index] and np.isfinite(theirs[index]).any():
                teacher.score.add(theirs[index], own, guess, falls=falls)
