"""The place of one teacher of a parameter-server group, with two halves."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistill import logical_table
from tfdistill import peer_reader
from tfdistill import row_writes
from tfdistill import savedmodel
from tfdistill import server_bundle
from tfdistill import student_graph
from tfdistill import teacher_slot
from tfdistill import versions
from tfdistill import worker_variable


class _HalfOfRows:
    """One half of a shard that has room for two versions."""

    def __init__(self, rows: tf.Variable, half: tf.Tensor) -> None:
        self._rows = rows
        self._start = half * (int(rows.shape[0]) // 2)
        self.dtype = rows.dtype
        self.shape = tf.TensorShape([rows.shape[0] // 2, rows.shape[1]])

    def gather_rows(self, rows: tf.Tensor) -> tf.Tensor:
        with tf.device(self._rows.device):
            return tf.gather(self._rows, tf.cast(rows, tf.int64) + self._start)


class RemoteSlot(teacher_slot.TeacherSlot):
    """The place of one teacher of a parameter-server group."""

    def __init__(
        self,
        name: str,
        graph: student_graph.StudentGraph,
        *,
        wait_until_free: Any,
    ) -> None:
        """Makes an empty place. Call it in the strategy's scope.

        Args:
            name: Name for logs.
            graph: The student's traced inference.
            wait_until_free: Waits until no execution in flight uses the half
                that was swapped out last.
        """
        super().__init__(name, graph)
        self._wait_until_free = wait_until_free
        self.half = 0
        self._tables = {
            index: [_two_halves(shard.value) for shard in variable.layer.shards]
            for index, variable in enumerate(graph.variables)
            if isinstance(variable, logical_table.LogicalTable)
        }
        self._masters: dict[int, tf.Variable] = {}
        self._local: dict[int, worker_variable.WorkerVariable] = {}
        for index, variable in enumerate(graph.variables):
            if index in self._tables:
                continue
            dtype = tf.as_dtype(variable.dtype)
            self._masters[index] = tf.Variable(
                tf.zeros([2, *variable.shape], dtype), trainable=False
            )
            self._local[index] = worker_variable.WorkerVariable(
                np.zeros(variable.shape, dtype.as_numpy_dtype),
                name=f"{name}_{index}",
            )
        self._version = worker_variable.WorkerVariable(
            np.int64(-1), name=f"{name}_version"
        )
        self._half: tf.Tensor | None = None
        self._on_trial = tf.function(self._infer_on_trial, autograph=False)

    # ---- on a worker ----

    @property
    def worker_variables(self) -> list[worker_variable.WorkerVariable]:
        """What each worker keeps of this teacher."""
        return [*self._local.values(), self._version]

    def use(self, arguments: tf.Tensor) -> None:
        """Takes the version that an execution is to use.

        Args:
            arguments: int64 `[4]`: version, in use, half, share.
        """
        version, in_use, self._half, _ = tf.unstack(arguments)
        is_new = (in_use > 0) & tf.not_equal(version, self._version.value())

        def fetch() -> tf.Tensor:
            for index, master in self._masters.items():
                with tf.device(master.device):
                    value = tf.gather(master, self._half)
                self._local[index].assign(value)
            self._version.assign(version)
            return tf.constant(True)

        tf.cond(is_new, fetch, lambda: tf.constant(False))

    def _own_graph(self) -> tuple[Any, list[Any]]:
        return self._infer, []

    def _infer(self, inputs: Any) -> list[tf.Tensor]:
        values = [
            [_HalfOfRows(rows, self._half) for rows in self._tables[index]]
            if index in self._tables
            else self._local[index].value()
            for index in range(len(self._graph.variables))
        ]
        return keras.tree.flatten(self._graph.infer_from(values, inputs))

    # ---- in the background, on the coordinator ----

    def _read_values(
        self, version: versions.Version, expected: Any
    ) -> savedmodel.Snapshot:
        """Reads a version into the half that is not in use."""
        self._wait_until_free()
        half, prefix = 1 - self.half, f"{version.path}/variables/variables"
        keys = list(expected)
        dense = savedmodel.read_variables(
            version.path,
            {keys[index]: expected[keys[index]] for index in self._masters},
        )
        for master, value in zip(self._masters.values(), dense, strict=True):
            with tf.device(master.device):
                row = tf.cast(value, master.dtype)[tf.newaxis]
                row_writes.write_rows(master, half, row)
        for index, shards in self._tables.items():
            finite = server_bundle.read_rows(
                prefix, keys[index], shards, half=half
            )
            if not finite:
                raise peer_reader.RejectedError(
                    f"{keys[index]} holds NaN or infinite values."
                )
        return []

    def _predict(self, values: Any, inputs: Any) -> list[Any]:
        """Runs the version in the half that is not in use."""
        half = tf.constant(1 - self.half, tf.int64)
        return list(self._on_trial(half, inputs))

    def _infer_on_trial(self, half: tf.Tensor, inputs: Any) -> list[tf.Tensor]:
        values: list[Any] = []
        for index in range(len(self._graph.variables)):
            if index in self._tables:
                shards = self._tables[index]
                values.append([_HalfOfRows(rows, half) for rows in shards])
                continue
            master = self._masters[index]
            with tf.device(master.device):
                values.append(tf.gather(master, half))
        return keras.tree.flatten(self._graph.infer_from(values, inputs))

    def _install(self, values: savedmodel.Snapshot) -> None:
        self.half = 1 - self.half


def _two_halves(shard: tf.Variable) -> tf.Variable:
    strategy = tf.distribute.get_strategy()
    shape = [2 * int(shard.shape[0]), int(shard.shape[1])]
    with strategy.extended.colocate_vars_with(shard):
        return tf.Variable(
            lambda: tf.zeros(shape, shard.dtype), trainable=False
        )
