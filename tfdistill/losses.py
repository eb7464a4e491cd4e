"""Distillation losses: what the student pays for differing from its teachers.

Each is a `keras.losses.Loss`. Its `y_true` is the aggregate of the teachers'
outputs, made by its own `aggregate()`; its `y_pred` is the student's output.
`call()` gives one value per example (or per position), of shape
`y_pred.shape[:-1]`, so that it is weighted, masked and reduced as a task loss.
"""

import contextlib
import math
import numbers
import threading
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import Self

import keras
import numpy as np
import tensorflow as tf

__all__ = [
    "BinarySoftTargetCrossEntropy",
    "DistillationLoss",
    "ForwardKL",
    "LogitsMeanSquaredError",
    "ReverseKL",
    "SoftTargetCrossEntropy",
]

# The smallest probability whose logarithm is taken: exp(-87.3).
TINY = float(np.finfo(np.float32).tiny)


class _Traced(threading.local):
    step: Any = 0


# The global step of the training step that this thread traces.
_traced = _Traced()


@contextlib.contextmanager
def at_step(step: tf.Tensor) -> Iterator[None]:
    """Makes this the step of which temperature schedules are functions."""
    _traced.step = step
    try:
        yield
    finally:
        del _traced.step  # The class has 0.


@keras.saving.register_keras_serializable(package="tfdistill")
class DistillationLoss(keras.losses.Loss):
    """Base class: turns several teachers' outputs into one soft target.

    A subclass only needs `call(y_true, y_pred)`; `compared` returns the values
    that most losses compare, and `scale` the factor for the temperature. Work
    is done in float32 (float64 if `dtype="float64"`), whatever the outputs'
    dtype.

    Args:
        temperature: Divides the logits of teachers and student, > 0. On
            probabilities it acts as `p ** (1 / temperature)`, renormalized. The
            loss is multiplied by its square, which keeps the size of the
            gradient (Hinton et al. 2015, section 2). A schedule, such as
            `keras.optimizers.schedules.PolynomialDecay(4.0, 1000, 1.0)`, gives
            each step its own temperature (outside of training: the temperature
            of step 0).
        from_logits: Whether teachers and student return logits. None, the
            default, means the same as for the task loss: `with_from_logits()`
            sets it.
        name: Name of the loss; by default made from the class.
        reduction: As for every Keras loss; `"sum_over_batch_size"`.
        dtype: As for every Keras loss; the Keras default float type.

    Raises:
        ValueError: If an argument is outside the values above.
    """

    def __init__(
        self,
        *,
        temperature: float | Callable[[Any], Any] = 1.0,
        from_logits: bool | None = None,
        name: str | None = None,
        reduction: str | None = "sum_over_batch_size",
        dtype: str | keras.DTypePolicy | None = None,
    ) -> None:
        super().__init__(name=name, reduction=reduction, dtype=dtype)
        if isinstance(temperature, dict):
            temperature = keras.saving.deserialize_keras_object(temperature)
        is_number = isinstance(temperature, numbers.Real)
        given: Any = temperature
        if not (callable(given) or is_number and 0 < given < math.inf):
            raise ValueError(
                "`temperature` must be a finite number > 0, or a schedule of "
                f"such numbers; received {temperature!r}. Use 1.0 for "
                "untempered soft targets."
            )
        if not (from_logits is None or isinstance(from_logits, bool)):
            raise ValueError(
                "`from_logits` must be True, False or None (the same as the "
                f"task loss); received {from_logits!r}."
            )
        self._temperature = (
            temperature if callable(temperature) else float(temperature)
        )
        self.from_logits = from_logits

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments, for serialization."""
        return {
            **super().get_config(),
            "temperature": self._temperature,
            "from_logits": self.from_logits,
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
            weights: `[num_teachers]`, or one weight per example (and position):
                `[num_teachers, batch, ...]`. Non-negative; they are divided by
                their sum over the teachers. If a weight is 0, the teacher's
                values are ignored and may be NaN.

        Returns:
            Tempered probabilities, in the shape of one teacher's output.
            (`LogitsMeanSquaredError`: logits.) Rows for which every weight is 0
            are all zeros and have no meaning, so give them `sample_weight` 0.

        Raises:
            ValueError: If shapes differ, or `from_logits` is still None.
        """
        logits_given = self._settled_from_logits()
        outputs = [self._cast(output) for output in teacher_outputs]
        shapes = [output.shape for output in outputs]
        if not all(shape.is_compatible_with(shapes[0]) for shape in shapes):
            raise ValueError(
                "All teachers must have outputs of the same shape; received "
                f"{[tuple(shape) for shape in shapes]}. Leave out the teacher "
                "that predicts something else."
            )
        weights = self._cast(weights)
        while len(weights.shape) <= len(shapes[0]):
            weights = weights[..., tf.newaxis]
        filler = 0.0 if logits_given else 0.5
        weighted_sum = tf.zeros_like(outputs[0])
        for index, output in enumerate(outputs):
            weight = weights[index]
            # Before any arithmetic: 0 * NaN is NaN, and so is its gradient.
            output = tf.where(weight > 0, output, tf.cast(filler, output.dtype))
            logits = output if logits_given else self._logits(output, 0.0)
            weighted_sum += self._probabilities(logits) * weight
        total = tf.reduce_sum(weights, axis=0)
        return tf.stop_gradient(tf.math.divide_no_nan(weighted_sum, total))

    def _settled_from_logits(self) -> bool:
        if self.from_logits is None:
            raise ValueError(
                f"`{type(self).__name__}` needs to know whether outputs are "
                "logits; received from_logits=None. Construct it with "
                "from_logits=True or False, or call with_from_logits()."
            )
        return self.from_logits

    def _cast(self, tensor: tf.Tensor) -> tf.Tensor:
        # Half precision is too coarse for sums over many classes.
        dtype = tf.float64 if self.dtype == "float64" else tf.float32
        return tf.cast(tensor, dtype)

    @property
    def temperature(self) -> Any:
        """A float; with a schedule, its scalar tensor at the traced step."""
        if not callable(self._temperature):
            return self._temperature
        found = self._temperature(_traced.step)
        return self._cast(found)

    @property
    def scale(self) -> Any:
        """What the loss is multiplied by, for its temperature."""
        return self.temperature**2

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
                "Teachers and student must have outputs of the same shape; "
                f"received {target.shape} from the teachers and "
                f"{student.shape} from the student. Check that both have the "
                "same classes in the same order."
            )
        if not self._settled_from_logits():
            student = self._logits(student, keras.config.epsilon())
        return target, student

    def compared(
        self, y_true: tf.Tensor, y_pred: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns the target, and log p and p of the student; all finite."""
        target, logits = self._target_and_student(y_true, y_pred)
        if len(logits.shape) < 2 or logits.shape[-1] == 1:
            raise ValueError(
                f"`{type(self).__name__}` needs outputs [batch, ..., classes] "
                f"with two classes or more; received shape {logits.shape}. For "
                "a sigmoid output use BinarySoftTargetCrossEntropy, for a "
                "regression LogitsMeanSquaredError(from_logits=True). With "
                "several outputs, name the outputs to distill: "
                "distillation_loss={output: loss}."
            )
        log_p = tf.nn.log_softmax(logits / self.temperature)
        # A class masked by a logit of -inf: no 0 * inf, no gradient.
        masked = tf.equal(logits, -math.inf)
        log_p = tf.where(masked, tf.cast(math.log(TINY), log_p.dtype), log_p)
        student = tf.where(masked, tf.zeros_like(log_p), tf.exp(log_p))
        return target, log_p, student


@keras.saving.register_keras_serializable(package="tfdistill")
class SoftTargetCrossEntropy(DistillationLoss):
    """Cross-entropy with the teachers' probabilities as soft targets.

    `-sum_c target_c * log_softmax(student / temperature)_c`, the loss of Anil
    et al. 2018.

    With `top_k`, the aggregate of the teachers keeps its k likeliest classes
    and one probability for all other classes together, and so does the student.
    This is a lower bound of the whole loss, and equals it if k is the number of
    classes or one less. Between the other classes the student is free.

    Example:
        >>> loss = SoftTargetCrossEntropy(top_k=2, from_logits=False)
        >>> target = [[0.5, 0.3, 0.1, 0.1]]
        >>> student = [[0.4, 0.2, 0.2, 0.2]]
        >>> round(float(loss(target, student)), 4)
        1.1242
    """

    def __init__(self, *, top_k: int | None = None, **kwargs: Any) -> None:
        """Takes what is compared, and the arguments of `DistillationLoss`.

        Args:
            top_k: Classes to compare, from 1 to the number of classes. Default
                None: all.
            **kwargs: As for `DistillationLoss`.

        Raises:
            ValueError: If an argument is outside the values above.
        """
        super().__init__(**kwargs)
        if top_k is not None and (top_k < 1 or top_k != int(top_k)):
            raise ValueError(
                f"`top_k` must be a whole number >= 1; received {top_k!r}."
            )
        self.top_k = top_k

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments, for serialization."""
        return {**super().get_config(), "top_k": self.top_k}

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Returns the cross-entropy in nats, shape `y_pred.shape[:-1]`."""
        target, log_p, _ = self.compared(y_true, y_pred)
        if self.top_k is None:
            return -self.scale * tf.reduce_sum(target * log_p, axis=-1)
        top, classes = tf.math.top_k(target, self.top_k)
        there = tf.gather(log_p, classes, batch_dims=len(log_p.shape) - 1)
        rest = self._rest(target, log_p, top[..., -1:], classes[..., -1:])
        return self.scale * (rest - tf.reduce_sum(top * there, axis=-1))

    def _rest(
        self,
        target: tf.Tensor,
        log_p: tf.Tensor,
        least: tf.Tensor,
        last: tf.Tensor,
    ) -> tf.Tensor:
        """Returns the cost of the rest; `least` is the last one's target."""
        # `top_k` takes the first of equal classes.
        is_later = tf.range(tf.shape(target)[-1]) > last
        in_rest = (target < least) | ((target == least) & is_later)
        mass = tf.reduce_sum(tf.where(in_rest, target, 0.0), axis=-1)
        # Not 1 - sum(top), nor its logarithm: a small rest would be noise.
        # The lowest number and not -inf, of which a gradient is NaN.
        log_rest = tf.where(in_rest, log_p, log_p.dtype.min)
        return -mass * tf.reduce_logsumexp(log_rest, axis=-1)


@keras.saving.register_keras_serializable(package="tfdistill")
class ForwardKL(DistillationLoss):
    """KL(teacher || student): the student must cover the teacher's classes.

    Equals the soft-target cross-entropy minus the teacher's entropy: the same
    gradient, but 0 at agreement. The arguments are the same as for
    `DistillationLoss`.
    """

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Returns the divergence in nats, shape `y_pred.shape[:-1]`."""
        target, log_p, _ = self.compared(y_true, y_pred)
        log_target = tf.math.log(tf.maximum(target, TINY))
        terms = target * (log_target - log_p)
        return self.scale * tf.reduce_sum(terms, axis=-1)


@keras.saving.register_keras_serializable(package="tfdistill")
class ReverseKL(DistillationLoss):
    """KL(student || teacher): the student must avoid what the teacher avoids.

    A class that the teacher gives no probability costs about 87 nats times the
    student's probability, not infinity. The arguments are the same as for
    `DistillationLoss`.
    """

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Returns the divergence in nats, shape `y_pred.shape[:-1]`."""
        target, log_p, student = self.compared(y_true, y_pred)
        log_target = tf.math.log(tf.maximum(target, TINY))
        terms = student * (log_p - log_target)
        return self.scale * tf.reduce_sum(terms, axis=-1)


@keras.saving.register_keras_serializable(package="tfdistill")
class LogitsMeanSquaredError(DistillationLoss):
    """Mean squared error between logits, over the classes.

    The target is the weighted mean of the teachers' logits. A class that both
    sides mask by a logit of -inf costs nothing.

    Args:
        from_logits: True, or None to use the task loss's setting, which must be
            True.
        **kwargs: As for `DistillationLoss`; the temperature cancels out.

    Raises:
        ValueError: If `from_logits` is False: probabilities have no logits.
    """

    def __init__(
        self, *, from_logits: bool | None = None, **kwargs: Any
    ) -> None:
        super().__init__(from_logits=from_logits, **kwargs)
        if from_logits is False:
            raise ValueError(
                "`LogitsMeanSquaredError` needs models that return logits; "
                "received from_logits=False. Drop the last activation, or use "
                "SoftTargetCrossEntropy."
            )

    def _probabilities(self, logits: tf.Tensor) -> tf.Tensor:
        return logits  # Logits are what is averaged and compared.

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
    labels]`; the mean is taken over the last axis, as Keras does. The arguments
    are the same as for `DistillationLoss`.
    """

    def _logits(self, probabilities: tf.Tensor, floor: float) -> tf.Tensor:
        p = tf.clip_by_value(probabilities, floor, 1.0 - floor)
        return tf.math.log(p) - tf.math.log1p(-p)

    def _probabilities(self, logits: tf.Tensor) -> tf.Tensor:
        return tf.math.sigmoid(logits / self.temperature)

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Returns the cross-entropy in nats, one value per example."""
        target, logits = self._target_and_student(y_true, y_pred)
        values = self.scale * tf.nn.sigmoid_cross_entropy_with_logits(
            labels=target, logits=logits / self.temperature
        )
        return values if len(values.shape) == 1 else tf.reduce_mean(values, -1)
