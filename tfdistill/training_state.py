"""Everything that training on parameter servers changes, written and read."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfdistill import remote_update
from tfdistill import remote_variables
from tfdistill import server_bundle


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingPoint:
    """Where a training stands between two steps, with none in flight.

    Attributes:
        step: Number of updates done.
        epoch: Index of the epoch in progress.
        batch: Number of its steps done.
        metric_sums: What its metrics have added up so far, under parameter
            servers.
        data: How far the data were read, without them.
    """

    step: int
    epoch: int
    batch: int
    metric_sums: tuple[float, ...] = ()
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class TrainingState:
    """The variables of model and optimizer, dense ones and tables."""

    def __init__(
        self,
        variables: remote_variables.RemoteVariables,
        update: remote_update.RemoteUpdate,
    ) -> None:
        """Names the variables.

        Args:
            variables: The model's.
            update: With the optimizer's slots.
        """
        self._dense: dict[str, Any] = {}
        for kind in ("trainable", "others", "optimizer"):
            for index, variable in enumerate(getattr(variables, kind)):
                self._dense[f"{kind}/{index}"] = variable.value
        for index, slots in enumerate(update.dense_slots):
            for name, slot in slots.items():
                self._dense[f"trainable/{index}/{name}"] = slot
        self._tables: dict[str, list[Any]] = {}
        first = 0
        for index, layer in enumerate(variables.tables):
            last = first + len(layer.shards)
            shards = [shard.value for shard in layer.shards]
            self._tables[f"table/{index}"] = shards
            for name in update.shard_slots[first]:
                self._tables[f"table/{index}/{name}"] = [
                    slots[name] for slots in update.shard_slots[first:last]
                ]
            first = last

    def specs(self) -> dict[str, dict[str, Any]]:
        """Returns shape and dtype of each tensor by its key."""
        found = {
            key: {"shape": list(v.shape), "dtype": v.dtype.name}
            for key, v in self._dense.items()
        }
        for key, shards in self._tables.items():
            rows = sum(int(shard.shape[0]) for shard in shards)
            found[key] = {
                "shape": [rows, int(shards[0].shape[1])],
                "dtype": shards[0].dtype.name,
            }
        return found

    def write(self, prefix: str) -> None:
        """Writes a checkpoint; the servers write the rows of tables.

        Args:
            prefix: Of the checkpoint's files; its directory must exist.
        """
        bundle = server_bundle.BundleWriter(prefix)
        bundle.add({key: v.read_value() for key, v in self._dense.items()})
        for key, shards in self._tables.items():
            bundle.add_rows(key, shards)
        bundle.finish()

    def read(self, prefix: str) -> None:
        """Reads what `write` wrote, with as many servers as there are now."""
        reader = tf.train.load_checkpoint(prefix)
        for key, variable in self._dense.items():
            variable.assign(reader.get_tensor(key))
        for key, shards in self._tables.items():
            server_bundle.read_rows(prefix, key, shards)
