"""Other values in the place of a table's rows, for pure functions of them."""

import contextlib
import threading
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

_replaced = threading.local()


@contextlib.contextmanager
def rows_from(sources: Mapping[Any, Sequence[Any]]) -> Iterator[None]:
    """Makes layers look up rows elsewhere than in their own variables.

    Holds in this thread only; an outer call's layers keep theirs.

    Args:
        sources: By `ShardedEmbedding`: tensors or variables `[rows, dim]`
            that make up the table in stored order, any number of them, cut as
            `RowLayout.with_shards` of their number cuts.
    """
    before = getattr(_replaced, "sources", {})
    given = {id(layer): list(rows) for layer, rows in sources.items()}
    _replaced.sources = {**before, **given}
    try:
        yield
    finally:
        _replaced.sources = before


def replaced(layer: Any) -> list[Any] | None:
    """Returns what a layer is to look up rows in; None: its own shards."""
    return getattr(_replaced, "sources", {}).get(id(layer))
