"""How a step on a worker comes by what it reads."""

import dataclasses
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

# Returns stored rows, int64 `[n]`, as `[n, dim]`.
Find = Callable[[tf.Tensor], tf.Tensor]


@dataclasses.dataclass
class Part:
    """Rows of one shard that a step looks up, as they are by now.

    Attributes:
        shard: The shard's variable.
        rows: Local rows of that shard, integers `[n]`, all different.
        value: Floats `[n, dim]`.
    """

    shard: tf.Variable
    rows: tf.Tensor
    value: tf.Tensor


class Fetching:
    """Reads variables when a step begins; it looks rows up where they lie.

    A subclass, made by what `compile(rows_ahead=)` was given, may have read
    both before. Calls come while an execution is traced: `begin`, then for each
    of its steps `next`, `assigned` and `updated` for the trained variables, and
    `assigned` for all.
    """

    def __init__(self, variables: Any) -> None:
        """Takes the model's `RemoteVariables`."""
        self.variables = variables

    def begin_fetch(self, batches: Sequence[Any]) -> None:
        """Begins an execution of a step for each batch."""

    def next(self) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Begins a step; returns what `RemoteVariables.read` does."""
        return self.variables.read()

    @property
    def parts(self) -> Sequence[Part]:
        """The rows that the step looks up, if they were read before."""
        return ()

    def lookups(self) -> Mapping[Any, Find]:
        """Returns by table what finds rows elsewhere than in its shards."""
        return {}

    def assigned(self, values: Sequence[tf.Tensor | None]) -> None:
        """Takes what the step assigned to dense variables, None for nothing.

        In their order: the trained ones, or these and all others.
        """

    def updated(
        self,
        dense: Sequence[Any],
        shards: Mapping[int, tf.IndexedSlices | None],
        hyper: Mapping[str, tf.Tensor],
    ) -> None:
        """Takes the gradients by which variables and shards were updated.

        `shards` has gradients by the id of the variable.
        """
