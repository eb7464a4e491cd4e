"""What teachers are worth on the student's own labelled batches.

The step compares a few rows of its batch: the task loss of each teacher, of the
student, and of a guess that ignores the inputs, which is the mean of the
student's own predictions there: base rates, for any number of classes, and the
mean of a regression. A peer without a labelled canary that is no better than
the guess has no weight. It is still asked, so that it can become better.

A student may have learned its rows by heart, and a good peer has not. So a peer
that is much worse than the student, but better than the guess, is only warned
of. With several outputs, or without a task loss, nothing is compared.
"""

import collections
import logging
import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill.system import keras_internals
from tfdistill.teachers import merit
from tfdistill.teachers import scale
from tfdistill.teachers import soft_targets
from tfdistill.training import steps

_log = logging.getLogger(__name__)
# Numbers of a step: of the student, of the guess, of the labels, then of each
# teacher its loss, and last of each teacher its mean prediction.
REPORT = "losses"
_NUM_COMMON = 3
# How many predictions are compared, which bounds the cost.
_MAX_ROWS = 256
# Reports that are averaged: at least so many, and the last ones.
_LEAST_REPORTS, _MOST_REPORTS = 3, 5
# Of what the student saves of the guess's loss, the share that a peer must save
# to count (0.3 is honest beside a student that has learned its clicks by
# heart). Below the share that a canary asks for it is warned of.
_SOME_SHARE = 0.15
# How far the mean of clicks may be off, on the logit, and in standard errors.
_MOST_OFF, _NUM_ERRORS = 0.25, 4.0


def compare(
    loss: Any, y: Any, y_pred: Any, weight: Any, soft: soft_targets.SoftTargets
) -> tf.Tensor | None:
    """Returns a step's report of one replica, float32 `[3 + 2 * teachers]`.

    NaN for what is not known; None if nothing can be compared.
    """
    losses, labels, own = map(keras.tree.flatten, (loss, y, y_pred))
    if not len(losses) == len(labels) == len(own) == 1 or losses[0] is None:
        return None
    inner, pred, target = losses[0].inner, own[0], labels[0]
    if not isinstance(target, tf.Tensor) or isinstance(weight, dict | list):
        return None
    count = max(1, _MAX_ROWS // math.prod(pred.shape[1:-1].as_list() or [1]))
    mask = getattr(pred, "_keras_mask", None)
    target, weight = (v if v is None else v[:count] for v in (target, weight))

    def mean_loss(outputs: tf.Tensor) -> tf.Tensor:
        if mask is not None:
            outputs._keras_mask = mask[:count]
        # Keras would divide by the number of replicas.
        with keras_internals.losses_of_one_replica():
            found = inner(target, outputs, weight)
        return tf.reduce_mean(tf.cast(found, tf.float32))

    pred = tf.stop_gradient(tf.cast(pred[:count], tf.float32))
    theirs = [outputs[:count] for outputs in soft.outputs[0]]
    found = [mean_loss(pred), mean_loss(_guess(inner, pred))]
    nothing = tf.constant(float("nan"))
    is_click = pred.shape[-1] == 1 and "binary" in inner.name
    found.append(
        tf.reduce_mean(tf.cast(target, tf.float32)) if is_click else nothing
    )
    of_teachers = [mean_loss(outputs) for outputs in theirs]
    means = [
        tf.reduce_mean(_probabilities(inner, outputs)) if is_click else nothing
        for outputs in theirs
    ]
    asked = tf.tile(soft.is_asked, [2])
    return tf.concat(
        [found, tf.where(asked, [*of_teachers, *means], nothing)], axis=0
    )


def regression(loss: Any) -> keras.losses.Loss | None:
    """Returns the one task loss if it compares numbers, not classes."""
    found = keras.tree.flatten(loss)
    inner = found[0].inner if len(found) == 1 and found[0] else None
    is_number = inner is not None and scale.gives_logits(inner) is None
    return inner if is_number else None


def logs(
    report: tf.Tensor | None, num_teachers: int, num_rows: tf.Tensor
) -> steps.Logs:
    """Returns what a step logs of its report.

    `teacher_loss` is the mean of those that are known, and what it counts
    beside other replicas and steps: the rows, or 0 if none is known.
    """
    if report is None:
        return {"teacher_loss": (tf.zeros([]), tf.zeros([]))}
    losses = report[_NUM_COMMON : _NUM_COMMON + num_teachers]
    known = tf.boolean_mask(losses, tf.math.is_finite(losses))
    count = tf.cast(tf.size(known), tf.float32)
    mean = tf.math.divide_no_nan(tf.reduce_sum(known), count)
    rows = tf.where(count > 0, tf.cast(num_rows, tf.float32), 0.0)
    return {"teacher_loss": (mean, rows), **steps.hidden(REPORT, report)}


def _probabilities(loss: Any, outputs: tf.Tensor) -> tf.Tensor:
    if not scale.gives_logits(loss):
        return outputs
    is_binary = "binary" in loss.name
    return tf.sigmoid(outputs) if is_binary else tf.nn.softmax(outputs)


def _guess(loss: Any, outputs: tf.Tensor) -> tf.Tensor:
    """Returns the same answer for all rows: the mean of the student's."""
    of_classes = "categorical" in loss.name
    axes = list(range(outputs.shape.rank - 1)) if of_classes else [0]
    found = _probabilities(loss, outputs)
    mean = tf.reduce_mean(found, axis=axes, keepdims=True)
    if scale.gives_logits(loss):
        rest = 1 - mean if "binary" in loss.name else tf.ones_like(mean)
        mean = tf.math.log(mean) - tf.math.log(rest)
    return tf.broadcast_to(mean, tf.shape(outputs))


class Record:
    """What the reports of the steps before refreshes said of one teacher."""

    def __init__(self, name: str) -> None:
        """Knows nothing yet."""
        self._name = name
        # Of each report the losses of the teacher, the student and the guess.
        self._losses: Any = collections.deque(maxlen=_MOST_REPORTS)
        # Rows so far, and the sums of their predictions and labels.
        self._clicks = [0.0, 0.0, 0.0]
        self._warned: set[str] = set()

    def add(self, report: Sequence[Any], index: int, num_rows: float) -> None:
        """Takes a report, in which the teacher has this index."""
        own, guess, label, *others = map(float, report)
        theirs, mean = others[index], others[len(others) // 2 + index]
        if math.isfinite(theirs + own + guess):
            self._losses.append([theirs, own, guess])
        if math.isfinite(mean + label):
            rows = min(num_rows, _MAX_ROWS)
            for place, value in enumerate((1.0, mean, label)):
                self._clicks[place] += rows * value
            self._check_clicks()

    @property
    def losses(self) -> list[float]:
        """The mean losses of the teacher, the student and the guess."""
        columns = list(zip(*self._losses, strict=True))
        return [sum(each) / len(each) for each in columns] or [math.nan] * 3

    def doubt(self, *, is_late: bool = False) -> str:
        """Returns why the teacher may not count; empty if it may.

        `is_late` is whether no newer version of it is in sight.
        """
        theirs, own, guess = self.losses
        if len(self._losses) < _LEAST_REPORTS or not guess > 0:
            return ""
        text = f"on the student's batches its loss is {theirs:.3g}, "
        # No single report outweighs the others.
        saved = [max(-1.0, 1 - each[0] / each[2]) for each in self._losses]
        can_judge = own < (1 - merit.LEAST_SKILL) * guess
        least = (
            _SOME_SHARE * (1 - own / guess) if can_judge else -merit.LEAST_SKILL
        )
        if sum(saved) / len(saved) < least:
            return f"{text}that of base rates {guess:.3g}."
        if not can_judge or guess - theirs > merit.LEAST_SHARE * (guess - own):
            return ""
        text += f"the student's {own:.3g}"
        if is_late:
            return f"{text}, and it has no newer version."
        self._warn(
            f"may be bad: {text}. Either the student has learned these "
            "examples by heart, or the teacher something else. Give `fit` "
            "`validation_data`, on which they are compared."
        )
        return ""

    def _check_clicks(self) -> None:
        rows, predicted, seen = self._clicks
        if not 0 < seen < rows or not 0 < predicted < rows:
            return
        means = predicted / rows, seen / rows
        off = math.log(means[0] / (1 - means[0]) * (1 - means[1]) / means[1])
        error = 1 / math.sqrt(seen * (1 - means[1]))
        if abs(off) > max(_MOST_OFF, _NUM_ERRORS * error):
            self._warn(
                f"predicts {means[0]:.3g} on average where the labels' mean is "
                f"{means[1]:.3g}, {off:+.2f} on the logit, and the student "
                "learns that, too. Are its data sampled otherwise?"
            )

    def _warn(self, text: str) -> None:
        kind = text[:9]
        if kind not in self._warned:
            _log.warning("The teacher %s %s", self._name, text)
        self._warned.add(kind)

    def status(self) -> dict[str, float | None]:
        """Returns the losses, for logs; None if they are not known."""
        found = [None if math.isnan(v) else v for v in self.losses]
        return dict(
            zip(("teacher_loss", "own_loss", "base_loss"), found, strict=True)
        )

    def state(self) -> dict[str, Any]:
        """Returns the reports, as JSON."""
        return {"losses": list(self._losses), "clicks": self._clicks}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes what `state` returned."""
        self._losses.extend(state.get("losses", ()))
        self._clicks = list(state.get("clicks", self._clicks))
