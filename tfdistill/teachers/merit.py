"""Whether a version of a peer is clearly worse than the student: the one rule.

Both answer the same labelled canary batch. The skill of a model is the share
of the loss of base rates that it saves: 0 for whoever knows only how often
each class occurs, 1 without any loss. Skills compare across data sets; losses
in nats do not.
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

_log = logging.getLogger(__name__)
# A version is worse if it has less than this share of the student's skill. On
# digits an honest peer has 0.98 of it, and one that learns from labels of which
# half are wrong 0.58 to 0.77.
_LEAST_SHARE = 0.8
# A student with less skill than this is no yardstick; a version whose loss is
# so many times that of base rates needs none.
_LEAST_SKILL, _WORSE_THAN_BASE = 0.05, 1.5


class Merit:
    """Compares the versions of peers with the student, on the chief.

    The training thread takes the student's values; the thread that reads
    versions finds all losses, the student's once for all peers. Class indices,
    0 and 1, and one-hot rows are labels; with other targets, or several
    outputs, nothing is compared.
    """

    def __init__(
        self, canary: canary_lib.Canary, student: teacher.Student
    ) -> None:
        """Traces the student: the other thread must not run its code."""
        graph, inputs = student.graph, canary.inputs
        self._from_logits = student.from_logits
        self._labels = labels_of(canary.targets)
        self._writer = saved_model.SavedModelWriter(graph)
        self._run = (
            on_servers.student_runner(graph, inputs)
            if student.on_servers
            else lambda values: keras.tree.flatten(graph(values, inputs))
        )
        self._run(self._writer.snapshot())
        self._last_losses: dict[str, float] = {}
        self.forget()

    def forget(self) -> None:
        """Compares nothing until `take`."""
        self._own_loss: Callable[[], float | None] = lambda: None

    def take(self) -> None:
        """Takes the student's values; their loss is found if somebody asks."""
        values = self._writer.snapshot()
        self._own_loss = functools.cache(lambda: self._loss(self._run(values)))

    def check(self, peer: str, outputs: list[tf.Tensor]) -> None:
        """Refuses a version with these outputs if it is clearly worse.

        Models with batch normalization may be much worse for the time of one
        version: the loss of the peer's version before is averaged in.
        """
        loss = self._loss(outputs)
        if loss is None:
            return
        before = self._last_losses.get(peer, loss)
        self._last_losses[peer] = loss
        least, own = min(loss, (loss + before) / 2), self._own_loss()
        if own is not None and is_worse(least, own, self._labels):
            raise screen.Refused(
                "on the canary batch, it is clearly worse than the student."
            )

    def _loss(self, outputs: list[tf.Tensor]) -> float | None:
        """Returns the mean cross-entropy in nats; None if there is none."""
        if self._labels is None:
            return None
        logits = _logits(outputs, from_logits=self._from_logits)
        labels, num_classes = self._labels, logits.shape[-1]
        fits = len(labels) == len(logits) and len(outputs) == 1
        if fits and labels.min() >= 0 and labels.max() < num_classes:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels, logits
            )
            return float(tf.reduce_mean(losses))
        # The labels are at fault, not these versions.
        self._labels = None
        _log.warning(
            "To compare teachers with the student, it must have one output, "
            "and the labels of held-out examples must be %d numbers in 0 to "
            "%d; received %d, from %d to %d. Versions are not compared.",
            *(len(logits), num_classes - 1),
            *(len(labels), labels.min(), labels.max()),
        )
        return None


def is_worse(loss: float, own: float, labels: Any) -> bool:
    """Whether a loss is clearly worse than the student's `own`, in nats."""
    _, counts = np.unique(labels, return_counts=True)
    rates = counts / counts.sum()
    base = float(-(rates * np.log(rates)).sum())
    if not base > 0:
        return False
    skill = 1 - own / base
    if skill < _LEAST_SKILL:
        return loss > _WORSE_THAN_BASE * base
    return 1 - loss / base < _LEAST_SHARE * skill


def _logits(outputs: list[tf.Tensor], *, from_logits: bool) -> tf.Tensor:
    """Returns a logit for each class, `[rows, classes]`, of the first output.

    One number a row is the logit, or the probability, of class 1.
    """
    values = tf.cast(outputs[0], tf.float32)
    values = tf.reshape(values, [-1, values.shape[-1]])
    if values.shape[-1] == 1:
        other = tf.zeros_like(values) if from_logits else 1 - values
        values = tf.concat([other, values], axis=-1)
    if from_logits:
        return values
    return tf.math.log(tf.clip_by_value(values, 1e-12, 1.0))


def labels_of(targets: Any) -> np.ndarray | None:
    """Returns targets as a vector of class indices; None if they are none."""
    flat = keras.tree.flatten(targets)
    if len(flat) != 1:
        return None
    values = np.asarray(flat[0])
    if values.dtype.kind not in "iub":
        if not np.isin(values, (0, 1)).all():
            return None
        if values.ndim > 1 and values.shape[-1] > 1:
            is_one_hot = (values.sum(axis=-1) == 1).all()
            return values.argmax(axis=-1).reshape(-1) if is_one_hot else None
    return values.astype(np.int64).reshape(-1)
