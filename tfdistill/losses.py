"""Distillation losses: what the student pays for differing from its teachers.

Each is a `keras.losses.Loss`. Its `y_true` is the aggregate of the teachers'
outputs, made by its own `aggregate()`; its `y_pred` is the student's output.
`call()` gives one value per example (or per position), of shape
`y_pred.shape[:-1]`, so that it is weighted, masked and reduced as a task loss.
"""

from typing import Any

import keras
import tensorflow as tf

from tfdistill import distillation_loss

__all__ = [
    "BinarySoftTargetCrossEntropy",
    "DistillationLoss",
    "ForwardKL",
    "LogitsMeanSquaredError",
    "ReverseKL",
    "SoftTargetCrossEntropy",
]

DistillationLoss = distillation_loss.DistillationLoss


@keras.saving.register_keras_serializable(package="tfdistill")
class SoftTargetCrossEntropy(DistillationLoss):
    """Cross-entropy with the teachers' probabilities as soft targets.

    `-sum_c target_c * log_softmax(student / temperature)_c`, the loss of Anil
    et al. 2018. Arguments are those of `DistillationLoss`.
    """

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Returns the cross-entropy in nats, shape `y_pred.shape[:-1]`."""
        target, log_p, _ = self._target_and_log_student(y_true, y_pred)
        return -self._scale() * tf.reduce_sum(target * log_p, axis=-1)


@keras.saving.register_keras_serializable(package="tfdistill")
class ForwardKL(DistillationLoss):
    """KL(teacher || student): the student must cover all the teacher does.

    Equals the soft-target cross-entropy less the teacher's entropy: the same
    gradient, but 0 at agreement. Arguments are those of `DistillationLoss`.
    """

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Returns the divergence in nats, shape `y_pred.shape[:-1]`."""
        target, log_p, _ = self._target_and_log_student(y_true, y_pred)
        log_target = tf.math.log(tf.maximum(target, distillation_loss.TINY))
        terms = target * (log_target - log_p)
        return self._scale() * tf.reduce_sum(terms, axis=-1)


@keras.saving.register_keras_serializable(package="tfdistill")
class ReverseKL(DistillationLoss):
    """KL(student || teacher): the student must avoid what the teacher does.

    A class that the teacher gives no probability costs about 87 nats times
    the student's probability, not infinity. Arguments are those of
    `DistillationLoss`.
    """

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Returns the divergence in nats, shape `y_pred.shape[:-1]`."""
        target, log_p, student = self._target_and_log_student(y_true, y_pred)
        log_target = tf.math.log(tf.maximum(target, distillation_loss.TINY))
        terms = student * (log_p - log_target)
        return self._scale() * tf.reduce_sum(terms, axis=-1)


@keras.saving.register_keras_serializable(package="tfdistill")
class LogitsMeanSquaredError(DistillationLoss):
    """Squared error between logits, its mean taken over the classes.

    The target is the weighted mean of the teachers' logits. A class that both
    sides mask by a logit of -inf costs nothing.

    Args:
        from_logits: True, or None for "as the task loss", which must be True.
        name: Name of the loss; by default made from the class.
        reduction: As for every Keras loss; `"sum_over_batch_size"`.
        dtype: As for every Keras loss; the Keras default float type.

    Raises:
        ValueError: If `from_logits` is False: probabilities have no logits.
    """

    def __init__(
        self,
        *,
        from_logits: bool | None = None,
        name: str | None = None,
        reduction: str | None = "sum_over_batch_size",
        dtype: Any = None,
    ) -> None:
        """Takes the arguments described above."""
        super().__init__(
            from_logits=from_logits,
            aggregation="logits",
            name=name,
            reduction=reduction,
            dtype=dtype,
        )
        if from_logits is not None and not from_logits:
            raise ValueError(
                "`LogitsMeanSquaredError` needs models that give logits; "
                "received from_logits=False. Drop the last activation, or "
                "use SoftTargetCrossEntropy."
            )

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments, for serialisation."""
        ours = ("name", "reduction", "from_logits", "dtype")
        config = super().get_config()
        return {key: config[key] for key in ours}

    def _probabilities(self, logits: tf.Tensor) -> tf.Tensor:
        return logits  # The target stays what was averaged.

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Returns the mean squared difference, shape `y_pred.shape[:-1]`."""
        target, logits = self._target_and_student(y_true, y_pred)
        both_masked = tf.math.is_inf(logits) & (logits == target)
        zeros = tf.zeros_like(logits)
        target = tf.where(both_masked, zeros, target)
        logits = tf.where(both_masked, zeros, logits)
        return tf.reduce_mean(tf.square(logits - target), axis=-1)


@keras.saving.register_keras_serializable(package="tfdistill")
class BinarySoftTargetCrossEntropy(DistillationLoss):
    """Cross-entropy of each output as a yes/no question (sigmoid, CTR).

    Outputs are `[batch]`, `[batch, 1]` or, with several labels, `[batch, ...,
    labels]`; the mean is taken over the last axis, as Keras does. Arguments
    are those of `DistillationLoss`.
    """

    def _logits(self, probabilities: tf.Tensor, floor: float) -> tf.Tensor:
        p = tf.clip_by_value(probabilities, floor, 1.0 - floor)
        return tf.math.log(p) - tf.math.log1p(-p)

    def _probabilities(self, logits: tf.Tensor) -> tf.Tensor:
        return tf.math.sigmoid(logits / self.temperature)

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Returns the cross-entropy in nats, one value per example."""
        target, logits = self._target_and_student(y_true, y_pred)
        values = self._scale() * tf.nn.sigmoid_cross_entropy_with_logits(
            labels=target, logits=logits / self.temperature
        )
        return values if len(values.shape) == 1 else tf.reduce_mean(values, -1)
