"""Floats that are kept as 8 or 4 bits each, beside float32 scales.

A row of a table, or an output channel of a kernel (an index of its last axis),
has one scale: its largest magnitude over 127, or over 7 with 4 bits. A value is
kept as the whole number of scales next to it, of two equally near ones the
even one, so that equal weights always give equal bytes. Of 4 bits, two values
are a byte, the first in the low half, and each is its number plus 8.
"""

import dataclasses
from collections.abc import Container
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistill.embedding import sources

_LARGEST = {"int8": 127, "int4": 7}
DTYPES = tuple(_LARGEST)
# A row of zeros needs a scale, too.
_SMALLEST_SCALE = np.finfo(np.float32).tiny


def scale_key(key: str) -> str:
    """Returns the checkpoint key of a variable's scales, by the variable's."""
    return "scales/" + key.removeprefix("model_variables/")


class Quantized(sources.OwnRows):
    """A value as it is kept; as a tensor, it is widened.

    Attributes:
        stored: Tensor or variable: int8, or uint8 with two values in each.
        scale: Tensor or variable, float32, that broadcasts to the value.
    """

    is_remote = False

    def __init__(
        self,
        stored: tf.Tensor | tf.Variable,
        scale: tf.Tensor | tf.Variable,
        shape: tf.TensorShape,
        dtype: tf.DType | None,
    ) -> None:
        """Takes the parts, and the shape and dtype of the widened value."""
        self.stored, self.scale = stored, scale
        self.shape, self.dtype = tf.TensorShape(shape), tf.as_dtype(dtype)

    def __tf_tensor__(
        self, dtype: tf.DType | None = None, name: str | None = None
    ) -> tf.Tensor:
        """Widens all of it."""
        del name
        widened = _widened(self.stored, self.scale, self.shape[-1])
        return tf.cast(widened, dtype or self.dtype)

    def gather_rows(self, rows: tf.Tensor) -> tf.Tensor:
        """Gathers some rows, and widens these only."""
        scale = self.scale
        if scale.shape[0] == self.stored.shape[0]:
            scale = tf.gather(scale, rows)
        found = _widened(tf.gather(self.stored, rows), scale, self.shape[-1])
        return tf.cast(found, self.dtype)

    @property
    def limit(self) -> tf.Tensor:
        """What no magnitude is above, by scale."""
        return 128.0 * self.scale

    def in_variables(self) -> "Quantized":
        """Returns the same in new variables."""
        stored, scale = (
            tf.Variable(part, trainable=False)
            for part in (self.stored, self.scale)
        )
        return Quantized(stored, scale, self.shape, self.dtype)

    def assign(self, value: "Quantized") -> None:
        """Sets the variables to a value that is kept alike."""
        self.stored.assign(value.stored)
        self.scale.assign(value.scale)


def _widened(
    stored: tf.Tensor | tf.Variable, scale: tf.Tensor | tf.Variable, dim: int
) -> tf.Tensor:
    stored = tf.convert_to_tensor(stored)
    if stored.dtype != tf.uint8:
        return tf.cast(stored, tf.float32) * scale
    halves = tf.stack(
        [tf.bitwise.bitwise_and(stored, 15), tf.bitwise.right_shift(stored, 4)],
        axis=-1,
    )
    shape = tf.concat([tf.shape(stored)[:-1], [2 * stored.shape[-1]]], axis=0)
    numbers = tf.cast(tf.reshape(halves, shape)[..., :dim], tf.float32) - 8.0
    numbers.set_shape([*stored.shape[:-1], dim])
    return numbers * scale


@dataclasses.dataclass(frozen=True)
class Form:
    """How a variable is written: cast, or as whole numbers of scales.

    Attributes:
        key: The variable's checkpoint key.
        shape: The variable's shape.
        dtype: The variable's dtype.
        stored: "int8" or "int4", or the dtype that it is cast to.
        by_row: Whether each row has its scale, rather than each channel.
    """

    key: str
    shape: Sequence[int | None]
    dtype: tf.DType
    stored: str
    by_row: bool = False

    @property
    def specs(self) -> dict[str, tf.TensorSpec]:
        """What is written, by checkpoint key."""
        if self.stored not in DTYPES:
            return {self.key: tf.TensorSpec(self.shape, self.stored)}
        first, *between, last = self.shape
        scale = [first if self.by_row else 1, *(1 for _ in between)]
        scale.append(1 if self.by_row else last)
        if self.stored == "int4":
            packed = [first, *between, (int(last or 0) + 1) // 2]
            number = tf.TensorSpec(packed, tf.uint8)
        else:
            number = tf.TensorSpec(self.shape, tf.int8)
        return {
            self.key: number,
            scale_key(self.key): tf.TensorSpec(scale, tf.float32),
        }

    def encode(self, value: tf.Tensor | tf.Variable) -> dict[str, tf.Tensor]:
        """Returns what is written of a value, or of some rows of a table."""
        if self.stored not in DTYPES:
            return {self.key: tf.cast(value, self.stored)}
        value = tf.cast(value, tf.float32)
        axes = list(range(len(self.shape)))
        axes.pop(0 if self.by_row else -1)
        largest = tf.reduce_max(tf.abs(value), axes, keepdims=True)
        scale = tf.maximum(largest / _LARGEST[self.stored], _SMALLEST_SCALE)
        number = tf.round(value / scale)
        stored = (
            _packed(number)
            if self.stored == "int4"
            else tf.cast(number, tf.int8)
        )
        return {self.key: stored, scale_key(self.key): scale}


def _packed(numbers: tf.Tensor) -> tf.Tensor:
    """Puts each two of the last axis in a byte; the last may be alone."""
    dim = numbers.shape[-1]
    codes = tf.cast(numbers + 8.0, tf.uint8)
    odd = [[0, 0]] * (codes.shape.rank - 1) + [[0, dim % 2]]
    codes = tf.pad(codes, odd)
    high = tf.bitwise.left_shift(codes[..., 1::2], 4)
    return tf.bitwise.bitwise_or(codes[..., ::2], high)


def whole(
    key: str,
    parts: Mapping[str, Any],
    shape: tf.TensorShape,
    dtype: tf.DType | None,
) -> Any:
    """Joins a variable's parts by key; one without scales is what it is."""
    scale = parts.get(scale_key(key))
    if scale is None:
        return parts[key]
    return Quantized(parts[key], scale, shape, dtype)


def parts_of(key: str, value: object) -> dict[str, Any]:
    """Returns the parts of a variable's value by key."""
    if isinstance(value, Quantized):
        return {key: value.stored, scale_key(key): value.scale}
    return {key: value}


def keys_of(key: str, names: Container[str]) -> list[str]:
    """Returns the keys of a variable's parts, of those that there are."""
    return [k for k in (key, scale_key(key)) if k == key or k in names]


def may_be(
    key: str, expected: Mapping[str, Any], found: Mapping[str, tf.TensorSpec]
) -> bool:
    """Whether the parts that were found are an expected variable's."""
    dtype, shape = tf.as_dtype(expected["dtype"]), list(expected["shape"])
    return (
        dtype.is_floating
        and len(shape) > 1
        and any(
            Form(key, shape, dtype, stored, by_row).specs == found
            for stored in DTYPES
            for by_row in (True, False)
        )
    )


def forms(values: Sequence[Any]) -> list[Any]:
    """Returns how each value is kept; None for one that is not quantized."""
    return [
        (v.stored.dtype, tuple(v.scale.shape))
        if isinstance(v, Quantized)
        else None
        for v in values
    ]
