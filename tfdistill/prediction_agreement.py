"""How far each teacher's predictions are those of the student.

Measured on the batch that the step has asked the teachers about anyway, and
on one replica's rows: it costs a comparison, and no collective.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdistill import losses as losses_lib

# The fraction of predictions for the same class; where an output has no
# classes, the mean distance from the student's value.
AGREEMENT, DIFFERENCE = "agreement", "mean_absolute_difference"


def kind_of(loss: Any, output: tf.Tensor) -> str:
    """Returns what can be said of an output: `AGREEMENT` or `DIFFERENCE`.

    Args:
        loss: The distillation loss of the output.
        output: The student's, `[batch, ...]`.
    """
    if isinstance(loss, losses_lib.BinarySoftTargetCrossEntropy):
        return AGREEMENT
    has_classes = output.shape.rank > 1 and output.shape[-1] != 1
    return AGREEMENT if has_classes else DIFFERENCE


def measure(
    loss: Any,
    teachers: Sequence[tf.Tensor],
    student: tf.Tensor,
    counts: Sequence[tf.Tensor],
) -> tf.Tensor:
    """Compares each teacher with the student on one output.

    Args:
        loss: The distillation loss of the output.
        teachers: What each teacher says, `[batch, ...]`.
        student: What the student says, `[batch, ...]`.
        counts: For each teacher which examples, or positions, count: float,
            0 or 1.

    Returns:
        float32 `[num_teachers]`; NaN for a teacher of whom nothing counts, as
        before it has a version.
    """
    compare = _comparison(loss, tf.cast(student, tf.float32))
    return tf.stack(
        [
            _mean_where(compare, teacher, count)
            for teacher, count in zip(teachers, counts, strict=True)
        ]
    )


def _comparison(loss: Any, student: tf.Tensor) -> Any:
    if kind_of(loss, student) == DIFFERENCE:
        return lambda teacher: _flat(tf.abs(teacher - student))
    if isinstance(loss, losses_lib.BinarySoftTargetCrossEntropy):
        middle = 0.0 if loss.from_logits else 0.5
        own_side = student > middle
        return lambda teacher: _flat(
            tf.cast((teacher > middle) == own_side, tf.float32)
        )
    own_class = tf.argmax(student, axis=-1)
    return lambda teacher: tf.cast(
        tf.argmax(teacher, axis=-1) == own_class, tf.float32
    )


def _flat(values: tf.Tensor) -> tf.Tensor:
    """Means over the last axis, as a loss has it."""
    return values if values.shape.rank == 1 else tf.reduce_mean(values, -1)


def _mean_where(
    compare: Any, teacher: tf.Tensor, count: tf.Tensor
) -> tf.Tensor:
    values = compare(teacher)
    # NaN of an example that does not count must not spread. Where none
    # counts, 0 / 0 is the NaN that says so.
    kept = tf.where(count > 0, values, tf.zeros_like(values))
    return tf.reduce_sum(kept) / tf.reduce_sum(count)
