"""The lookup tables inside a student: vocabularies of its text layers."""

import hashlib
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

_Table: Any = tf.saved_model.experimental.TrackableResource


def used(model: keras.Model, captured: Sequence[Any]) -> list[Any]:
    """Finds the tables that a traced function of a model looks into.

    Args:
        model: Any Keras model, with layers nested to any depth.
        captured: The function's captured tensors.

    Returns:
        The tables, each once, in the order of the layers' attributes. Layers
        hold others too, from the time when they were adapted.
    """
    handles = {id(tensor) for tensor in captured}
    return [
        table
        for table in _walk(model, set())
        if id(table.resource_handle) in handles
    ]


def _walk(value: Any, seen: set[int]) -> Iterator[Any]:
    if id(value) in seen:
        return
    if isinstance(value, _Table):
        seen.add(id(value))
        yield value
    elif isinstance(value, keras.layers.Layer):
        seen.add(id(value))
        for attribute in vars(value).values():
            yield from _walk(attribute, seen)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _walk(item, seen)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _walk(item, seen)


def fingerprint(tables: Sequence[Any]) -> str:
    """Hashes what the tables hold: another vocabulary is another graph.

    Args:
        tables: Lookup tables; resources that cannot be read count by number.

    Returns:
        SHA-256 in hexadecimal; empty without tables.
    """
    if not tables:
        return ""
    digest = hashlib.sha256()
    for table in tables:
        digest.update(b"table")
        if hasattr(table, "export"):
            keys, values = (column.numpy() for column in table.export())
            for key, value in sorted(
                zip(keys.tolist(), values.tolist(), strict=True)
            ):
                digest.update(repr((key, value)).encode())
    return digest.hexdigest()
