"""The weighted mean of several teachers' outputs, some of them masked."""

from collections.abc import Callable
from collections.abc import Sequence

import tensorflow as tf

__all__ = ["weighted_mean"]


def weighted_mean(
    outputs: Sequence[tf.Tensor],
    *,
    weights: tf.Tensor,
    transform: Callable[[tf.Tensor], tf.Tensor],
    filler: float,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the weighted mean of the transformed outputs.

    Args:
        outputs: One float tensor `[batch, ...]` per teacher, all of one shape
            and dtype.
        weights: `[num_teachers]` or `[num_teachers, batch, ...]`, of the
            outputs' dtype, >= 0. Where it is 0 the output may be NaN.
        transform: Applied to each output before the mean is taken; keeps the
            shape and the dtype.
        filler: A value in the domain of `transform`, put in place of masked
            outputs.

    Returns:
        The mean, zero where no weight is positive; and the sum of the
        weights over the teachers, broadcastable to the mean.

    Raises:
        ValueError: If there is no output, or shapes do not fit.

    Example:
        >>> nan = float("nan")
        >>> mean, total = weighted_mean(
        ...     [tf.constant([1.0, nan]), tf.constant([3.0, 5.0])],
        ...     weights=tf.constant([[1.0, 0.0], [1.0, 1.0]]),
        ...     transform=tf.identity,
        ...     filler=0.0,
        ... )
        >>> mean.numpy().tolist(), total.numpy().tolist()
        ([2.0, 5.0], [2.0, 1.0])
    """
    _check_shapes(outputs, weights)
    missing = len(outputs[0].shape) - len(weights.shape) + 1
    for _ in range(missing):
        weights = weights[..., tf.newaxis]
    weighted_sum = tf.zeros_like(outputs[0])
    for index, output in enumerate(outputs):
        weight = weights[index]
        # Before any arithmetic: 0 * NaN is NaN, and so is its gradient.
        output = tf.where(weight > 0, output, tf.cast(filler, output.dtype))
        weighted_sum += transform(output) * weight
    total = tf.reduce_sum(weights, axis=0)
    return tf.math.divide_no_nan(weighted_sum, total), total


def _check_shapes(outputs: Sequence[tf.Tensor], weights: tf.Tensor) -> None:
    if not outputs:
        raise ValueError(
            "`teacher_outputs` must hold at least one tensor; received none. "
            "Leave the distillation loss out while there is no teacher."
        )
    shapes = [output.shape for output in outputs]
    if not all(shape.is_compatible_with(shapes[0]) for shape in shapes):
        raise ValueError(
            "All teachers must have outputs of one shape; received "
            f"{[tuple(shape) for shape in shapes]}. Leave out the teacher "
            "that predicts something else."
        )
    rank = len(weights.shape)
    if rank < 1 or not weights.shape[:1].is_compatible_with([len(outputs)]):
        raise ValueError(
            "`weights` must have one row per teacher; received shape "
            f"{tuple(weights.shape)} for {len(outputs)} teachers."
        )
    per_teacher = weights.shape[1:]
    fits = per_teacher.is_compatible_with(shapes[0][: rank - 1])
    if rank > len(shapes[0]) + 1 or not fits:
        raise ValueError(
            "`weights` must be [num_teachers] or [num_teachers, batch, ...] "
            f"with the outputs' leading dimensions; received weights of shape "
            f"{tuple(weights.shape)} for outputs of shape {tuple(shapes[0])}."
        )
