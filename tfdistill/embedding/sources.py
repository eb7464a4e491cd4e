"""Where lookups get rows: a table's shards, or what a scope puts there."""

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


class OnServer(OwnRows):
    """A shard on a server, gathered there."""

    def __init__(self, shard: tf.Variable) -> None:
        self._shard = shard
        self.dtype, self.shape = shard.dtype, shard.shape

    def gather_rows(self, rows: tf.Tensor) -> tf.Tensor:
        """Gathers rows where they are; the tape sees the shard."""
        with tf.device(self._shard.device):
            return tf.gather(self._shard, rows)


def gather(
    source: tf.Tensor | tf.Variable | OwnRows, rows: tf.Tensor
) -> tf.Tensor:
    """Returns rows of one source: a tensor, a variable, or `OwnRows`."""
    if isinstance(source, OwnRows):
        return source.gather_rows(rows)
    return tf.gather(source, rows)


class _Given(threading.local):
    """What this thread's lookups read in place of a table's own shards."""

    sources: Mapping[int, Any] = {}


_given = _Given()
Sources = Sequence[Any] | Callable[[tf.Tensor], tf.Tensor]


@contextlib.contextmanager
def rows_from(sources: Mapping[Any, Sources]) -> Iterator[None]:
    """Makes lookups find rows elsewhere than in a table's own variables.

    By `Table`: tensors, variables or `OwnRows`, `[rows, dim]`, that make up the
    table in stored order, any number of them, cut as `RowLayout.with_shards`
    of their number cuts; or a function from stored rows, int64 `[n]`, to their
    values, `[n, dim]`. It holds in this thread only; an outer call's tables
    keep theirs.
    """
    before = _given.sources
    _given.sources = {**before, **{id(t): s for t, s in sources.items()}}
    try:
        yield
    finally:
        _given.sources = before


def given(table: object) -> Sources | None:
    """Returns what a table's lookups read in this thread, if not its shards."""
    return _given.sources.get(id(table))
