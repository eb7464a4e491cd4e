"""What teachers are worth on the student's own labelled batches.

The step hands out a few rows of its batch, as they are: the labels, and what
the student and its teachers predict. At refreshes the chief compares the task
losses of the last ones. A peer without a labelled canary that is no better than
a guess has no weight. It is still asked, so that it can become better.

A student may have learned its rows by heart, and a good peer has not. So a peer
that is much worse than the student, but better than the guess, is only warned
of. With several outputs, or without a task loss, nothing is compared.
"""

import logging
import math
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistill.teachers import yardstick as yardstick_lib

_log = logging.getLogger(__name__)
# The name of what a step reports.
ROWS = "rows"
# How many predictions are compared, and how many sequences of unknown length.
_MAX_ROWS, _FEW = 256, 8
# The last reports are pooled: so many, and more of small batches. Fewer
# predictions say nothing, and few reports must be surer.
_NUM_REPORTS, _FEW_REPORTS, _LEAST_PREDICTIONS = 5, 2, 64
# Of what the student saves of the guess's loss, the share that a peer must save
# to count: 0.3 is honest beside a student that has learned its clicks by heart.
# Of one that knows nothing from its own labels, the student's teaching makes
# half a model: so it is judged early, and must save more to count again. A peer
# that surely saves less than that is warned of.
_SOME_SHARE, _MOST_OF_IT = 0.15, 0.75
# How far the mean of clicks may be off, on the logit, and in standard errors.
_MOST_OFF, _NUM_ERRORS = 0.25, 4.0


def rows(
    y: Any,
    y_pred: Any,
    weight: Any,
    asked: tf.Tensor,
    answers: Sequence[Sequence[tf.Tensor]],
) -> list[tf.Tensor]:
    """Returns what a step reports of one replica; empty for several outputs.

    Which teachers were `asked`; the labels, which the first rows have; what
    the student and each teacher predict; and of a mask, or else of weights,
    which predictions count.
    """
    labels, own, weights = map(keras.tree.flatten, (y, y_pred, weight))
    is_one = len(labels) == len(own) == 1 and len(weights) <= 1
    if not is_one or not isinstance(labels[0], tf.Tensor):
        return []
    counts = [w for w in weights if w is not None]
    mask = getattr(own[0], "_keras_mask", None)
    if mask is not None:
        counts = [mask]
    sizes = own[0].shape[1:-1]
    num_rows = _FEW
    if sizes.is_fully_defined():
        num_rows = max(1, _MAX_ROWS // math.prod(sizes.as_list()))
    found = [labels[0], own[0], *answers[0], *counts]
    lengths = {value.shape[0] for value in found}
    if len(lengths) == 1 and 0 < (own[0].shape[0] or 0) <= num_rows:
        return [asked, *found]  # Each operation costs time.
    num_rows = tf.minimum(num_rows, tf.shape(labels[0])[0])
    return [asked, *(value[:num_rows] for value in found)]


class Reports:
    """Compares in the chief's reports what teachers and the student predict."""

    def __init__(self, yardstick: yardstick_lib.Yardstick) -> None:
        """Traces nothing yet."""
        self._yardstick = yardstick
        self._find = tf.function(self._compared, reduce_retracing=True)
        self._has_failed = False

    def _compared(
        self, labels: tf.Tensor, outputs: Sequence[tf.Tensor]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the losses of the guess, the student and the teachers.

        `[2 + teachers, predictions]`, and, of clicks, the labels and what the
        teachers predict, `[1 + teachers, predictions]`.
        """
        found = self._yardstick
        guess = found.guess(outputs[0])
        losses = [found.losses(labels, each) for each in (guess, *outputs)]
        clicks = [tf.cast(labels, tf.float32)]
        clicks += [found.probabilities(each) for each in outputs[1:]]
        is_click = found.is_binary and outputs[0].shape[-1] == 1
        return tf.stack(losses), tf.stack(
            [tf.reshape(each, [-1]) for each in clicks] if is_click else []
        )

    def read(
        self, report: Sequence[Any], teachers: Sequence[Any], wanted: np.ndarray
    ) -> None:
        """Adds a step's report to the records of the teachers that are wanted.

        `wanted` is bool `[teachers]`.
        """
        asked, labels, *outputs = report
        is_meant = wanted & (np.asarray(asked) > 0)
        end = 1 + len(teachers)
        outputs, counts = outputs[:end], outputs[end:]
        try:
            losses, clicks = map(np.asarray, self._find(labels, outputs))
        except Exception as error:  # Of a loss that the user has written.
            if not self._has_failed:
                _log.warning(
                    "Teachers are not compared with the student, because the "
                    "task loss cannot be computed outside a step: %s",
                    error,
                )
            self._has_failed = True
            return
        guess, own, *theirs = losses
        counted = np.isfinite(guess + own)
        for each in counts:
            # Some losses have one value for all.
            if len(counted) % np.size(each) == 0:
                counted &= np.repeat(each, len(counted) // np.size(each)) > 0
        for index, teacher in enumerate(teachers):
            known = counted & np.isfinite(theirs[index])
            if not is_meant[index] or not known.any():
                continue
            found = theirs[index], own, guess
            teacher.record.add(*(losses[known] for losses in found))
            if len(clicks):
                teacher.record.add_clicks(
                    clicks[1 + index][known], clicks[0][known]
                )


class Record:
    """What the steps before refreshes said of one teacher."""

    def __init__(self) -> None:
        """Knows nothing yet."""
        # Of each report: how many predictions, the sums of the losses of the
        # teacher, the student and the guess, and that of the squares of the
        # differences of the first two.
        self._reports = np.zeros([0, 5])
        # Rows so far, and the sums of their predictions and labels.
        self._clicks = np.zeros(3)
        self._warned: set[str] = set()

    def add(
        self, theirs: np.ndarray, own: np.ndarray, guess: np.ndarray
    ) -> None:
        """Takes a report: losses of the teacher, the student, the guess."""
        sums = [np.sum(losses) for losses in (theirs, own, guess)]
        report = [len(own), *sums, np.sum((theirs - own) ** 2)]
        self._reports = np.array([*self._reports, report])
        later = self._reports[1:]
        if (
            len(later) >= _NUM_REPORTS
            and later[:, 0].sum() >= _LEAST_PREDICTIONS
        ):
            self._reports = later

    def add_clicks(self, predicted: np.ndarray, seen: np.ndarray) -> None:
        """Takes the probabilities that it gave to clicks, and the clicks."""
        self._clicks += len(seen), predicted.sum(), seen.sum()

    def _means(self) -> tuple[float, np.ndarray]:
        """Returns the number of predictions, and the means of the others."""
        count, *sums = self._reports.sum(axis=0)
        return count, np.array(sums) / max(count, 1)

    def status(self) -> dict[str, float | None]:
        """Returns the mean losses, for logs; None if they are not known."""
        count, means = self._means()
        names = ("teacher_loss", "own_loss", "base_loss")
        return {
            name: float(mean) if count else None
            for name, mean in zip(names, means, strict=False)
        }

    def state(self) -> dict[str, Any]:
        """Returns what a backup keeps, as JSON."""
        return {
            "reports": self._reports.tolist(),
            "clicks": self._clicks.tolist(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` returned."""
        self._reports = np.reshape(state["reports"], [-1, 5])
        self._clicks = np.array(state["clicks"])

    def doubt(
        self, name: str, *, before: str = "", is_late: bool = False
    ) -> str:
        """Returns why the teacher may not count, "" if it may.

        `before` is what was returned last, and again if too little is known;
        `is_late` whether no newer version of it is in sight.
        """
        count, (theirs, own, base, square) = self._means()
        if count < _LEAST_PREDICTIONS:
            return before
        error = math.sqrt(max(0.0, square - (theirs - own) ** 2) / count)
        found = theirs, own, base, error
        text = (
            f"on the student's batches its loss is {theirs:.3g}, the student's "
            f"{own:.3g}"
        )
        if yardstick_lib.is_worse(
            *found,
            least_share=_MOST_OF_IT if before else _SOME_SHARE,
            num_errors=float(len(self._reports) <= _FEW_REPORTS),
        ):
            return f"{text}, that of base rates {base:.3g}."
        if is_late and yardstick_lib.is_worse(*found):
            return f"{text}, and it has no newer version."
        if yardstick_lib.is_worse(*found, least_share=_MOST_OF_IT):
            self._warn(
                name,
                f"may be bad: {text}. Either the student has memorized these "
                "examples, or the teacher has learned something else. Pass "
                "`validation_data` to `fit`, to compare them on it.",
            )
        return ""

    def check_clicks(self, name: str) -> None:
        """Warns, once, if it predicts too many clicks, or too few."""
        count, predicted, seen = self._clicks
        if not 0 < seen < count or not 0 < predicted < count:
            return
        means = predicted / count, seen / count
        off = math.log(means[0] / (1 - means[0]) * (1 - means[1]) / means[1])
        error = 1 / math.sqrt(seen * (1 - means[1]))
        if abs(off) > max(_MOST_OFF, _NUM_ERRORS * error):
            self._warn(
                name,
                f"predicts {means[0]:.3g} on average where the labels' mean "
                f"is {means[1]:.3g}, {off:+.2f} on the logit, and the student "
                "learns this bias. Check whether its data are sampled "
                "differently.",
            )

    def _warn(self, name: str, text: str) -> None:
        kind = text[:9]
        if kind not in self._warned:
            _log.warning("The teacher %s %s", name, text)
        self._warned.add(kind)
