"""Everything that training changes where each replica holds all variables.

Most of it is the same on all replicas: weights, the optimizer's slots. The
rest each replica has for itself: moving statistics, the states of random
generators, sums of metrics. Those of all workers travel to the chief in one
small collective, so that one task writes a whole state.
"""

import dataclasses
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistill import chief_only
from tfdistill import savedmodel
from tfdistill import worker_values

_PREFIX = "state"
# What collectives can carry: each value as whole numbers of its own width.
_BITS = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A state as it was between two steps; buffers are shared until then.

    Attributes:
        shared: What all replicas hold alike, by key.
        own: What each replica has for itself, one value each, by key.
    """

    shared: dict[str, Any]
    own: dict[str, Any]


class ReplicaState:
    """The variables of a built and compiled model under any such strategy."""

    def __init__(self, model: Any) -> None:
        """Names the variables.

        Args:
            model: A `CodistillModel` that `fit` has prepared.
        """
        self._strategy = model.distribute_strategy
        self._is_chief = chief_only.is_chief(self._strategy)
        self._replicas = worker_values.local_replicas(self._strategy)
        self._num_replicas = int(self._strategy.num_replicas_in_sync)
        trainable = list(model.trainable_variables)
        metrics = list(model.metrics_variables)
        known = {id(v) for v in (*trainable, *metrics)}
        others = [v for v in model.variables if id(v) not in known]
        self._trainable = _numbered("trainable", trainable)
        self._shared = {
            **self._trainable,
            **_numbered("optimizer", model.optimizer.variables),
        }
        for index, (_, _, slots) in enumerate(model.table_slots):
            for name, slot in slots.items():
                self._shared[f"table/{index}/{name}"] = slot
        self._metrics = _numbered("metric", metrics)
        self._own = {**_numbered("other", others), **self._metrics}
        self._gather = tf.function(
            lambda: self._strategy.run(self._in_replica), autograph=False
        )

    def specs(self) -> dict[str, dict[str, Any]]:
        """Returns shape and dtype of each variable by its key."""
        return {
            key: {
                "shape": list(variable.shape),
                "dtype": tf.as_dtype(variable.dtype).name,
            }
            for key, variable in {**self._shared, **self._own}.items()
        }

    # ---- out ----

    def snapshot(self) -> Snapshot:
        """Takes all current values; every worker calls it at the same step.

        Reading shares the variables' buffers, as
        `savedmodel.SavedModelWriter.snapshot` says.

        Returns:
            The values; those of `shared` on the chief only.
        """
        shared = self._shared if self._is_chief else {}
        return Snapshot(
            {
                key: tf.convert_to_tensor(self._copies(variable)[0])
                for key, variable in shared.items()
            },
            self._gathered(),
        )

    def _gathered(self) -> dict[str, Any]:
        if not self._own:
            return {}
        if self._num_replicas == 1:
            return {
                key: [tf.convert_to_tensor(self._copies(variable)[0])]
                for key, variable in self._own.items()
            }
        found = self._strategy.experimental_local_results(self._gather())
        rows, own, first = found[0].numpy(), {}, 0
        for key, variable in self._own.items():
            dtype = tf.as_dtype(variable.dtype)
            size = int(np.prod(variable.shape))
            bits = rows[:, first : first + size]
            first += size
            own[key] = (
                bits.astype(_BITS[dtype.size].as_numpy_dtype)
                .view(dtype.as_numpy_dtype)
                .reshape([self._num_replicas, *variable.shape])
            )
        return own

    def _in_replica(self) -> tf.Tensor:
        bits = [
            tf.reshape(_as_bits(tf.identity(_value(variable))), [-1])
            for variable in self._own.values()
        ]
        context = tf.distribute.get_replica_context()
        return context.all_gather(tf.concat(bits, axis=0)[None], axis=0)

    def write(self, directory: str, snapshot: Snapshot) -> None:
        """Writes a checkpoint. May run in a background thread.

        Args:
            directory: An existing directory.
            snapshot: What `snapshot` returned on the chief.

        Raises:
            ValueError: A weight is NaN or infinite.
        """
        weights = {key: snapshot.shared[key] for key in self._trainable}
        savedmodel.check_finite(
            list(weights.values()),
            [getattr(v, "path", key) for key, v in self._trainable.items()],
        )
        with tf.device("CPU:0"):
            own = {key: tf.stack(each) for key, each in snapshot.own.items()}
            values = {**snapshot.shared, **own}
            tf.raw_ops.SaveV2(
                prefix=f"{directory}/{_PREFIX}",
                tensor_names=list(values),
                shape_and_slices=[""] * len(values),
                tensors=[tf.identity(value) for value in values.values()],
            )

    # ---- in ----

    def read(self, directory: str) -> Snapshot:
        """Reads what `write` wrote; changes nothing.

        Args:
            directory: Of the backup, whose specs were compared.
        """
        reader = tf.train.load_checkpoint(f"{directory}/{_PREFIX}")
        return Snapshot(
            {key: reader.get_tensor(key) for key in self._shared},
            {key: reader.get_tensor(key) for key in self._own},
        )

    def assign(self, snapshot: Snapshot) -> None:
        """Gives this worker's replicas their values, but for the metrics.

        Where there are more or fewer replicas than there were, floats become
        the mean over the replicas, and what is no float the first one's.
        """
        for key, variable in self._shared.items():
            for copy in self._copies(variable):
                copy.assign(snapshot.shared[key])
        for key, variable in self._own.items():
            if key not in self._metrics:
                self._assign_own(variable, snapshot.own[key])

    def assign_metrics(self, snapshot: Snapshot) -> None:
        """Gives the metrics the sums of an epoch in progress.

        Where the number of replicas is another, they start anew.
        """
        for key, variable in self._metrics.items():
            values = snapshot.own[key]
            if len(values) == self._num_replicas:
                self._assign_own(variable, values)

    def _assign_own(self, variable: Any, values: np.ndarray) -> None:
        if len(values) != self._num_replicas:
            is_float = tf.as_dtype(variable.dtype).is_floating
            value = values.mean(axis=0) if is_float else values[0]
            values = np.stack([value.astype(values.dtype)] * self._num_replicas)
        copies = self._copies(variable)
        for index, copy in zip(self._replicas, copies, strict=True):
            copy.assign(values[index])

    def _copies(self, variable: Any) -> tuple[Any, ...]:
        return self._strategy.experimental_local_results(_value(variable))


def _numbered(kind: str, variables: Any) -> dict[str, Any]:
    return {f"{kind}/{index}": v for index, v in enumerate(variables)}


def _value(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable


def _as_bits(value: tf.Tensor) -> tf.Tensor:
    if value.dtype == tf.bool:
        return tf.cast(value, tf.int64)
    return tf.cast(tf.bitcast(value, _BITS[value.dtype.size]), tf.int64)
