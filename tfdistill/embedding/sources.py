"""Where lookups get rows: a layer's shards, or what a scope puts there."""

import contextlib
import threading
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import tensorflow as tf


class OwnRows:
    """A source of rows that gathers them by itself, where they are.

    Attributes:
        is_remote: Whether that may be on another task.
    """

    is_remote = True
    dtype: tf.DType
    shape: tf.TensorShape

    def gather_rows(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns some of its rows."""
        raise NotImplementedError


def gather(
    source: Any, rows: tf.Tensor, *, on_device: bool = False
) -> tf.Tensor:
    """Returns rows of one source, which may be read on its own device."""
    if isinstance(source, OwnRows):
        return source.gather_rows(rows)
    if not on_device:
        return tf.gather(source, rows)
    with tf.device(source.device):
        return tf.gather(source, rows)


class _Replaced(threading.local):
    """What this thread's lookups read in place of a layer's own shards."""

    sources: Mapping[int, Any] = {}
    find: Callable[[Any, tf.Tensor], tf.Tensor] | None = None


replaced = _Replaced()


@contextlib.contextmanager
def rows_from(sources: Mapping[Any, Sequence[Any]]) -> Iterator[None]:
    """Makes layers look up rows elsewhere than in their own variables.

    By `ShardedEmbedding`: tensors or variables `[rows, dim]` that make up
    the table in stored order, any number of them, cut as
    `RowLayout.with_shards` of their number cuts. It holds in this thread
    only; an outer call's layers keep theirs.
    """
    before = replaced.sources
    given = {id(layer): list(rows) for layer, rows in sources.items()}
    replaced.sources = {**before, **given}
    try:
        yield
    finally:
        replaced.sources = before


@contextlib.contextmanager
def vectors_by(find: Callable[[Any, tf.Tensor], tf.Tensor]) -> Iterator[None]:
    """Makes layers ask a function for their own rows, `[n, dim]`.

    It is given the layer and the stored rows, int64 `[n]`. It holds in this
    thread only; layers whose rows come `rows_from` elsewhere do not ask.
    """
    before, replaced.find = replaced.find, find
    try:
        yield
    finally:
        replaced.find = before
