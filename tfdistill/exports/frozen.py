"""Frozen variables, which versions may leave out: which base those are.

What a base is, and where it lies: exchange/bases.py.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistill.exchange import bases


class Namer:
    """Names values, and looks again only at what may have changed.

    TensorFlow never writes to memory that other code holds. So values at the
    address of values that were named, and are still held, are the same.
    """

    def __init__(self) -> None:
        """Holds nothing."""
        self._held: list[np.ndarray] = []
        self._name = ""

    def name(self, values: Mapping[str, np.ndarray]) -> str:
        """Returns the name of the base that holds these values."""
        held = [values[key] for key in sorted(values)]
        if list(map(_place, held)) != list(map(_place, self._held)):
            self._held, self._name = held, bases.name_of(blocks(values))
        return self._name


def _place(value: np.ndarray) -> tuple[int, int]:
    return value.ctypes.data, value.nbytes


def blocks(values: Mapping[str, np.ndarray]) -> list[Any]:
    """Returns the bytes of a base: by sorted key, each in C order."""
    flat = (np.ascontiguousarray(values[k]).reshape(-1) for k in sorted(values))
    return [value.view(np.uint8).data for value in flat]


def missing(
    place: bases.Bases,
    name: str,
    held: Mapping[str, Any],
    specs: Mapping[str, Mapping[str, Any]],
    namer: Namer,
) -> dict[str, np.ndarray]:
    """Reads the values of a base, by key; none if `held` has the same.

    `specs` are a manifest's, of the variables that are in the base; `held` has
    these. CorruptVersionError if the base is not there, or another.
    """
    dtypes = {
        key: tf.as_dtype(spec["dtype"]).as_numpy_dtype
        for key, spec in specs.items()
    }
    ours = {key: _exactly(held.get(key), dtypes[key]) for key in specs}
    known = {key: value for key, value in ours.items() if value is not None}
    if len(known) == len(specs) and namer.name(known) == name:
        return {}
    shapes = {key: spec["shape"] for key, spec in specs.items()}
    empty = {key: np.empty(shapes[key], dtypes[key]) for key in sorted(specs)}
    rest = place.read(name, sum(value.nbytes for value in empty.values()))
    start = 0
    for key, value in empty.items():
        flat = np.frombuffer(rest, np.uint8, value.nbytes, start)
        empty[key] = flat.view(value.dtype).reshape(value.shape)
        start += value.nbytes
    return empty


def _exactly(value: Any, dtype: Any) -> np.ndarray | None:
    """Casts a value, without a copy where there is nothing to cast.

    None if it is none, or cannot be cast back.
    """
    if value is None:
        return None
    tensor = tf.convert_to_tensor(value)
    cast = tf.cast(tensor, dtype)
    if cast.dtype != tensor.dtype and not bool(
        tf.reduce_all(tf.cast(cast, tensor.dtype) == tensor)
    ):
        return None
    return np.asarray(cast)
