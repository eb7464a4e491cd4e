"""The base of all distillation losses: outputs to soft targets."""

import math
import numbers
from collections.abc import Sequence
from typing import Any
from typing import Self

import keras
import numpy as np
import tensorflow as tf

from tfdistill import aggregation

__all__ = ["DistillationLoss"]

_AGGREGATIONS = ("probabilities", "logits")
# The smallest probability whose logarithm is taken: exp(-87.3).
TINY = float(np.finfo(np.float32).tiny)


@keras.saving.register_keras_serializable(package="tfdistill")
class DistillationLoss(keras.losses.Loss):
    """Base class: turns several teachers' outputs into one soft target.

    A subclass needs only `call(y_true, y_pred)`. Work is done in float32
    (float64 where `dtype="float64"`), whatever the outputs' dtype.

    Args:
        temperature: Divides the logits of teachers and student, > 0. On
            probabilities it acts as `p ** (1 / temperature)`, renormalised.
        from_logits: Whether teachers and student give logits. None, the
            default, means "as the task loss": `with_from_logits()` settles it.
        aggregation: `"probabilities"` averages the teachers' (tempered)
            probabilities, as Anil et al. 2018, Algorithm 1; `"logits"`
            averages their logits.
        scale_by_temperature_squared: Multiply the loss by `temperature ** 2`,
            which keeps the size of its gradient (Hinton et al. 2015,
            section 2). Default True; no effect at temperature 1.
        name: Name of the loss; by default made from the class.
        reduction: As for every Keras loss; `"sum_over_batch_size"`.
        dtype: As for every Keras loss; the Keras default float type.

    Raises:
        ValueError: If an argument is outside the values above.
    """

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        from_logits: bool | None = None,
        aggregation: str = "probabilities",
        scale_by_temperature_squared: bool = True,
        name: str | None = None,
        reduction: str | None = "sum_over_batch_size",
        dtype: Any = None,
    ) -> None:
        """Takes the arguments described above."""
        super().__init__(name=name, reduction=reduction, dtype=dtype)
        is_number = isinstance(temperature, numbers.Real)
        if not (is_number and 0 < temperature < math.inf):
            raise ValueError(
                "`temperature` must be a finite number > 0; received "
                f"{temperature!r}. Use 1.0 for untempered soft targets."
            )
        if aggregation not in _AGGREGATIONS:
            raise ValueError(
                f"`aggregation` must be one of {_AGGREGATIONS}; received "
                f"{aggregation!r}."
            )
        if not (from_logits is None or isinstance(from_logits, bool)):
            raise ValueError(
                "`from_logits` must be True, False or None (as the task "
                f"loss); received {from_logits!r}."
            )
        self.temperature = float(temperature)
        self.from_logits = from_logits
        self.aggregation = aggregation
        self.scale_by_temperature_squared = bool(scale_by_temperature_squared)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments, for serialisation."""
        return {
            **super().get_config(),
            "temperature": self.temperature,
            "from_logits": self.from_logits,
            "aggregation": self.aggregation,
            "scale_by_temperature_squared": self.scale_by_temperature_squared,
            "dtype": self.dtype,
        }

    def with_from_logits(self, from_logits: bool) -> Self:
        """Returns a copy of this loss whose `from_logits` is the given one."""
        return self.from_config(
            {**self.get_config(), "from_logits": from_logits}
        )

    def aggregate(
        self, teacher_outputs: Sequence[tf.Tensor], weights: tf.Tensor
    ) -> tf.Tensor:
        """Returns the weighted mean of the teachers, the `y_true` of `call`.

        No gradient goes through it.

        Args:
            teacher_outputs: One float tensor `[batch, ..., classes]` per
                teacher, all of one shape and of any float dtype.
            weights: `[num_teachers]`, or one weight per example (and
                position): `[num_teachers, batch, ...]`. Non-negative; they
                are divided by their sum over the teachers. Where a weight is
                0 the teacher's values are not looked at: they may be NaN.

        Returns:
            Tempered probabilities, in the shape of one teacher's output.
            (`LogitsMeanSquaredError`: logits.) Rows for which every weight is
            0 are all zeros; they mean nothing, so give them `sample_weight` 0.

        Raises:
            ValueError: If shapes do not fit, or `from_logits` is unsettled.
        """
        logits_given = self._settled_from_logits()
        means_logits = self.aggregation == "logits"
        # One teacher's 0 must not veto a class in a mean of logarithms.
        floor = keras.config.epsilon() if means_logits else 0.0

        def transform(output: tf.Tensor) -> tf.Tensor:
            logits = output if logits_given else self._logits(output, floor)
            return logits if means_logits else self._probabilities(logits)

        mean, total = aggregation.weighted_mean(
            [self._cast(output) for output in teacher_outputs],
            weights=self._cast(weights),
            transform=transform,
            filler=0.0 if logits_given else 0.5,
        )
        target = self._probabilities(mean) if means_logits else mean
        target = tf.where(total > 0, target, tf.zeros_like(target))
        return tf.stop_gradient(target)

    def _settled_from_logits(self) -> bool:
        if self.from_logits is None:
            raise ValueError(
                f"`{type(self).__name__}` does not know yet whether outputs "
                "are logits; received from_logits=None. Construct it with "
                "from_logits=True or False, or call with_from_logits()."
            )
        return self.from_logits

    def _cast(self, tensor: Any) -> tf.Tensor:
        # Half precision is too coarse for sums over many classes.
        dtype = tf.float64 if self.dtype == "float64" else tf.float32
        return tf.cast(tensor, dtype)

    def _scale(self) -> float:
        scaled = self.scale_by_temperature_squared
        return self.temperature**2 if scaled else 1.0

    def _logits(self, probabilities: tf.Tensor, floor: float) -> tf.Tensor:
        return tf.math.log(tf.maximum(probabilities, floor))

    def _probabilities(self, logits: tf.Tensor) -> tf.Tensor:
        return tf.nn.softmax(logits / self.temperature)

    def _target_and_student(
        self, y_true: tf.Tensor, y_pred: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the target and the student's logits, not yet tempered."""
        target, student = self._cast(y_true), self._cast(y_pred)
        if not target.shape.is_compatible_with(student.shape):
            raise ValueError(
                "Teachers and student must have outputs of one shape; "
                f"received {target.shape} from the teachers and "
                f"{student.shape} from the student. Same classes, same order?"
            )
        if not self._settled_from_logits():
            student = self._logits(student, keras.config.epsilon())
        return target, student

    def _target_and_log_student(
        self, y_true: tf.Tensor, y_pred: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns target, log p and p of the student; all of them finite."""
        target, logits = self._target_and_student(y_true, y_pred)
        if len(logits.shape) < 2 or logits.shape[-1] == 1:
            raise ValueError(
                f"`{type(self).__name__}` needs outputs [batch, ..., classes] "
                f"with two classes or more; received shape {logits.shape}. "
                "For a sigmoid output use BinarySoftTargetCrossEntropy, for "
                "a regression LogitsMeanSquaredError(from_logits=True); of "
                "several outputs name those to distil: "
                "distillation_loss={output: loss}."
            )
        log_p = tf.nn.log_softmax(logits / self.temperature)
        # A class masked by a logit of -inf: no 0 * inf, no gradient.
        masked = tf.math.is_inf(logits) & (logits < 0)
        log_p = tf.where(masked, tf.cast(math.log(TINY), log_p.dtype), log_p)
        student = tf.where(masked, tf.zeros_like(log_p), tf.exp(log_p))
        return target, log_p, student
