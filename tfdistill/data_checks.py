"""Refuses examples that no model can learn from, and says which they are.

TensorFlow trains on silently when a feature is NaN, and every weight is NaN
from then on. A label beyond the number of classes is an error on a CPU, and a
loss of NaN elsewhere.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdistill.system import keras_internals

# Around a message, to find it in what TensorFlow makes of an error.
_MARKED = re.compile(r"<data>(.*?)</data>", re.DOTALL)
_SPARSE_LABEL = re.compile(
    r"Received a label value of (-?\d+) which is outside the valid range of "
    r"\[0, (\d+)\)"
)
_REMEDY = "Fix or remove the example"


class DataError(ValueError):
    """The data are missing, faulty, or too few."""


def checked(
    dataset: tf.data.Dataset,
    *,
    num_classes: int | None = None,
) -> tf.data.Dataset:
    """Returns the same data set, which fails at the first faulty batch.

    Features, targets and weights of a floating dtype must be finite, and class
    indices within their range. The check runs in the input pipeline, parallel
    to training. `fit` ends with a `DataError`.

    Args:
        dataset: Elements `x`, `(x, y)` or `(x, y, sample_weight)`, batched or
            not. Later steps of the pipeline are not checked.
        num_classes: Classes that all integer targets are indices of. Default
            None: not checked.

    Returns:
        The same elements.

    Raises:
        ValueError: If `num_classes` is not positive, or no target is of
            integers.

    Example:
        >>> import numpy as np
        >>> rows = np.float32([[1.0], [np.nan]])
        >>> dataset = checked(tf.data.Dataset.from_tensor_slices(rows).batch(2))
        >>> try:
        ...     with told():
        ...         next(iter(dataset))
        ... except DataError as error:
        ...     print(str(error).split(".")[0])
        x must be finite; received nan at [1 0] of batch 0
    """
    targets = [
        name
        for name, value in _named(dataset.element_spec)
        if name.startswith("y")
        and not keras_internals.is_none(value)
        and value.dtype.is_integer
    ]
    if num_classes is not None and (num_classes < 1 or not targets):
        raise ValueError(
            "`num_classes` must be >= 1, and the data set must have such "
            f"integer targets; received {num_classes} for {targets or 'none'}."
        )

    def check(number: tf.Tensor, element: object) -> Any:
        faults = [
            fault
            for name, value in _named(element)
            if value is not None
            for fault in _faults(
                name, value, num_classes if name in targets else None
            )
        ]
        checks = [_refuse(number, *fault) for fault in faults]
        with tf.control_dependencies(checks):
            return tf.nest.map_structure(
                lambda leaf: None if leaf is None else tf.identity(leaf),
                element,
                expand_composites=True,
            )

    return dataset.enumerate().map(check, num_parallel_calls=tf.data.AUTOTUNE)


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Turns TensorFlow's error over faulty data into a `DataError`.

    Such an error was caused by `checked`, or by a label that a loss refuses.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        marked = _MARKED.search(error.message)
        if marked:
            raise DataError(marked[1]) from error
        label = _SPARSE_LABEL.search(error.message)
        if label:
            raise DataError(
                f"Labels must be from 0 to {int(label[2]) - 1}, one for each "
                f"output; received {label[1]}. {_REMEDY}, give the model more "
                "outputs, or find the batch with "
                "tfdistill.data.checked(dataset, num_classes=...)."
            ) from error
        raise


def check_parts(number: int, num_groups: int) -> None:
    """Checks that each group gets one of a number of elements, if known."""
    if 0 <= number < num_groups:
        raise DataError(
            "Disjoint parts need at least one element per group; received "
            f"{number} elements for {num_groups} groups. Use "
            'mode="shared", or shard before batching.'
        )


def _named(element: object) -> list[tuple[str, Any]]:
    """Leaves of an element, each with the name that messages give it."""
    parts = keras.utils.unpack_x_y_sample_weight(element)
    return [
        (name + "".join(f"[{key}]" for key in path), leaf)
        for name, part in zip(("x", "y", "sample_weight"), parts, strict=True)
        if part is not None
        for path, leaf in keras.tree.flatten_with_path(part)
    ]


def _faults(name: str, value: Any, num_classes: int | None) -> Any:
    """Yields what must hold, and a mask of where it does not."""
    if isinstance(value, tf.RaggedTensor):
        value = value.flat_values
    if isinstance(value, tf.SparseTensor):
        value = value.values
    if value.dtype.is_floating:
        yield f"{name} must be finite", value, ~tf.math.is_finite(value)
    if num_classes is not None:
        yield (
            f"{name} must be from 0 to {num_classes - 1}",
            value,
            (value < 0) | (value >= tf.cast(num_classes, value.dtype)),
        )


def _refuse(
    number: tf.Tensor, wanted: str, value: tf.Tensor, faulty: tf.Tensor
) -> tf.Operation:
    def fail() -> tf.Tensor:
        where = tf.where(faulty)[0]
        message = tf.strings.format(
            f"<data>{wanted}; received {{}} at {{}} of batch {{}}. {_REMEDY}."
            "</data>",
            (tf.gather_nd(value, where), where, number),
        )
        with tf.control_dependencies([tf.debugging.Assert(False, [message])]):
            return tf.constant(False)

    return tf.cond(tf.reduce_any(faulty), fail, lambda: tf.constant(True)).op
