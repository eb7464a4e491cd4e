"""Overwrites rows of a variable in place, on the task that holds it."""

import tensorflow as tf


def write_rows(variable: tf.Variable, first: int, values: tf.Tensor) -> None:
    """Overwrites rows that follow one another, where the variable lives.

    Args:
        variable: One variable of one device, `[rows, ...]`.
        first: Row that the first value is for.
        values: Its dtype, `[number of rows, ...]`.
    """
    with tf.device(variable.device):
        tf.raw_ops.ResourceStridedSliceAssign(
            ref=variable.handle,
            begin=[first],
            end=[first + int(values.shape[0])],
            strides=[1],
            value=values,
        )
