"""Teachers of a parameter-server group: tables on servers, the rest on workers.

A teacher's tables lie in shards beside the student's, each with room for two
versions: one in use, one being read. Its dense weights are kept by every
worker, which fetches them once for each version. Which version and which half
are in force travels with each execution, so a swap interrupts no worker, and
one execution never mixes two versions.

Parameter servers hold what workers share. What a worker keeps for itself, the
teachers' dense weights, must not cost a message each step, and must come back
by itself on a worker that was restarted. The public operations of resource
variables do both: a handle is found by name on the worker that runs the
function, and made there if it is not.
"""

import time
import uuid
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistill.embedding import rows
from tfdistill.embedding import sources
from tfdistill.embedding import tables
from tfdistill.exchange import deltas
from tfdistill.exchange import versions
from tfdistill.exports import saved_model
from tfdistill.exports import server_bundle
from tfdistill.exports import student_graph
from tfdistill.follow import screen
from tfdistill.teachers import soft_targets
from tfdistill.teachers import teacher as teacher_lib


class WorkerVariable:
    """A variable of the worker on which a function happens to run."""

    def __init__(self, initial: object, *, name: str) -> None:
        """Takes the value on a worker that has none yet; makes nothing."""
        self._initial = np.asarray(initial)
        self._dtype = tf.as_dtype(self._initial.dtype)
        # Never an earlier run's: servers outlive a coordinator.
        self._shared_name = f"tfdistill/{name}/{uuid.uuid4().hex}"
        self._handle: tf.Tensor | None = None

    def open(self) -> None:
        """Makes it usable in the function that is being traced.

        It gets one handle there, so that reads and writes keep their order.
        """
        self._handle = tf.raw_ops.VarHandleOp(
            dtype=self._dtype,
            shape=self._initial.shape,
            shared_name=self._shared_name,
        )

        def initialize() -> tf.Tensor:
            self.assign(self._initial)
            return tf.constant(True)

        tf.cond(
            tf.raw_ops.VarIsInitializedOp(resource=self._handle),
            lambda: tf.constant(True),
            initialize,
        )

    def value(self) -> tf.Tensor:
        """Returns the value on this worker."""
        value = tf.raw_ops.ReadVariableOp(
            resource=self._handle, dtype=self._dtype
        )
        value.set_shape(self._initial.shape)
        return value

    def assign(self, value: tf.Tensor | np.ndarray) -> None:
        """Sets the value on this worker."""
        tf.raw_ops.AssignVariableOp(
            resource=self._handle, value=tf.cast(value, self._dtype)
        )


class _Half(sources.OnServer):
    """One of the equal parts of a shard on a server."""

    def __init__(self, shard: tf.Variable, num: int, half: tf.Tensor) -> None:
        super().__init__(shard)
        count = int(shard.shape[0]) // num
        self._start = half * count
        self.shape = tf.TensorShape([count, shard.shape[1]])

    def gather_rows(self, rows: tf.Tensor) -> tf.Tensor:
        """Gathers rows where they are."""
        return super().gather_rows(tf.cast(rows, tf.int64) + self._start)


class _Between(sources.OwnRows):
    """Interpolates between the rows of two shards, `share` of the way."""

    def __init__(
        self, start: tf.Variable, end: sources.OwnRows, share: tf.Tensor
    ) -> None:
        self._ends, self._share = (sources.OnServer(start), end), share
        self.dtype, self.shape = end.dtype, end.shape

    def gather_rows(self, rows: tf.Tensor) -> tf.Tensor:
        """Gathers both where they are."""
        start, end = (each.gather_rows(rows) for each in self._ends)
        if not self.dtype.is_floating:  # Ids: there is nothing between them.
            return end
        return start + tf.cast(self._share, self.dtype) * (end - start)


class ServerCopy:
    """A model's values on parameter servers, which workers fetch once each.

    Those of a peer have room for the version to come.

    Attributes:
        num_installs: How often another version was put in use.
    """

    def __init__(
        self,
        name: str,
        graph: student_graph.StudentGraph,
        values: saved_model.Snapshot | None = None,
        *,
        wait_until_free: Callable[[], None],
    ) -> None:
        """Makes an empty copy. Call it in the strategy's scope.

        `values` are given for a model that never changes: its tables are used
        in place, and the rest is copied. `wait_until_free` waits until no
        execution in flight uses the half that was swapped out last.
        """
        self._graph = graph
        self._num_halves = 2 if values is None else 1
        self._wait_until_free = wait_until_free
        self.num_installs = 0
        # If the group publishes deltas: the values in use, as they were read.
        self._read_here: saved_model.Snapshot = []
        self._tables = {
            index: [
                _two_halves(shard.value) if values is None else shard.value
                for shard in variable.shards
            ]
            for index, variable in enumerate(graph.variables)
            if isinstance(variable, tables.Table)
        }
        self._masters: dict[int, tf.Variable] = {}
        self._local: dict[int, WorkerVariable] = {}
        for index, variable in enumerate(graph.variables):
            if index in self._tables:
                continue
            dtype = tf.as_dtype(variable.dtype)
            self._masters[index] = tf.Variable(
                tf.zeros([2, *variable.shape], dtype)
                if values is None
                else tf.expand_dims(values[index], 0),
                trainable=False,
            )
            self._local[index] = WorkerVariable(
                np.zeros(variable.shape, dtype.as_numpy_dtype),
                name=f"{name}_{index}",
            )
        # What a worker has fetched: steps may belong to several groups.
        self._fetched_at = WorkerVariable(np.int64(-1), name=f"{name}_installs")
        self._half: tf.Tensor | None = None
        self._on_trial = tf.function(
            lambda half, inputs: self._infer(
                half, lambda index: self._fetched(index, half), inputs
            ),
            autograph=False,
        )

    def _infer(
        self, half: tf.Tensor, dense: Callable[[int], tf.Tensor], inputs: object
    ) -> list[tf.Tensor]:
        tables = {
            index: [_Half(shard, self._num_halves, half) for shard in shards]
            for index, shards in self._tables.items()
        }
        return _infer(self._graph, tables, dense, inputs)

    def _fetched(self, index: int, half: tf.Tensor) -> tf.Tensor:
        master = self._masters[index]
        with tf.device(master.device):
            return tf.gather(master, half)

    @property
    def variables(self) -> list[Any]:
        """The values of a model that never changes; of a table, its shards."""
        return [
            self._tables[index]
            if index in self._tables
            else self._masters[index][0]
            for index in range(len(self._graph.variables))
        ]

    # ---- on a worker ----

    def use(self, share: tf.Tensor, num_installs: tf.Tensor) -> None:
        """Takes what an execution is to use; fetches it if it is new here."""
        for variable in (*self._local.values(), self._fetched_at):
            variable.open()
        num_installs = tf.cast(num_installs, tf.int64)
        self._half = num_installs % self._num_halves
        is_old = tf.equal(num_installs, self._fetched_at.value())

        def fetch() -> tf.Tensor:
            for index, local in self._local.items():
                local.assign(self._fetched(index, self._half))
            self._fetched_at.assign(num_installs)
            return tf.constant(True)

        tf.cond(
            (tf.abs(share) > 0) & ~is_old, fetch, lambda: tf.constant(False)
        )

    def infer(self, inputs: object) -> list[tf.Tensor]:
        """Runs the version in use, in the step."""
        return self._infer(
            self._half, lambda index: self._local[index].value(), inputs
        )

    # ---- in the background, on the coordinator ----

    @property
    def held(self) -> Sequence[Any]:
        """What is in use, to put deltas over; None if it was not read here."""
        return self._read_here or [None] * len(self._graph.variables)

    def read(
        self, version: versions.Version, expected: Mapping[str, Any]
    ) -> saved_model.Snapshot:
        """Reads a version into the half that is not in use.

        If the group publishes deltas, it returns the values, for `prepared`.
        """
        if deltas.frame_of(version.manifest) is not None:
            return saved_model.read_variables(
                version.path, expected, widen=False
            )
        half = self._free_half()
        prefix, keys = f"{version.path}/variables/variables", list(expected)
        dense = saved_model.read_variables(
            version.path,
            expected,
            only={keys[index] for index in self._masters},
        )
        self._write_dense(dense, half)
        for index, shards in self._tables.items():
            finite = server_bundle.read_rows(
                prefix, keys[index], shards, half=half, here=version.is_copy
            )
            if not finite:
                raise screen.Refused(
                    f"{keys[index]} holds NaN or infinite values."
                )
        return []

    def prepared(self, values: saved_model.Snapshot) -> saved_model.Snapshot:
        """Puts values that were read here into the half that is not in use.

        None stands for what is held.
        """
        if not values:
            return []
        half = self._free_half()
        pairs = zip(values, self.held, strict=True)
        values = [held if value is None else value for value, held in pairs]
        self._write_dense([values[index] for index in self._masters], half)
        for index, shards in self._tables.items():
            server_bundle.send_rows(values[index], shards, half=half)
        return values

    def _free_half(self) -> int:
        """Returns the half that is not in use, once it is free to be filled."""
        self._wait_until_free()
        return 1 - self.num_installs % 2

    def _write_dense(self, values: Sequence[Any], half: int) -> None:
        for master, value in zip(self._masters.values(), values, strict=True):
            with tf.device(master.device):
                row = tf.cast(value, master.dtype)[tf.newaxis]
                rows.write_rows(master, half, row)

    def fits(self, values: saved_model.Snapshot) -> bool:
        """Whether it can hold them: they are in place, and widened."""
        return True

    def try_out(self, values: object, inputs: object) -> list[Any]:
        """Runs the version in the half that is not in use, or the only one."""
        half = tf.constant((self.num_installs + 1) % self._num_halves, tf.int64)
        return list(self._on_trial(half, inputs))

    def install(self, values: saved_model.Snapshot) -> None:
        """Puts the version in use that was read into the other half."""
        self.num_installs += 1
        self._read_here = values


def _infer(
    graph: student_graph.StudentGraph,
    tables: dict[int, list[Any]],
    dense: Callable[[int], tf.Tensor],
    inputs: object,
) -> list[tf.Tensor]:
    values = [
        tables[index] if index in tables else dense(index)
        for index in range(len(graph.variables))
    ]
    return keras.tree.flatten(graph.infer_from(values, inputs))


def _two_halves(shard: tf.Variable) -> tf.Variable:
    strategy = tf.distribute.get_strategy()
    shape = [2 * int(shard.shape[0]), int(shard.shape[1])]
    with strategy.extended.colocate_vars_with(shard):
        return tf.Variable(
            lambda: tf.zeros(shape, shard.dtype), trainable=False
        )


def student_runner(
    graph: student_graph.StudentGraph, starts: Sequence[Any] | None = None
) -> Callable[..., list[Any]]:
    """Returns a function that runs the student from the coordinator.

    It takes what a snapshot holds, inputs, and a share, and returns the flat
    list of outputs. Tables are not part of a snapshot: their rows are read as
    they are, or, with `starts`, a share of the way from the shards there.
    """
    ends = {
        index: [sources.OnServer(shard.value) for shard in variable.shards]
        for index, variable in enumerate(graph.variables)
        if isinstance(variable, tables.Table)
    }

    def infer(
        dense: dict[str, Any], inputs: object, share: tf.Tensor | float
    ) -> list[Any]:
        tables: dict[int, list[Any]] = {
            index: [
                _Between(start, end, share)
                for start, end in zip(starts[index], shards, strict=True)
            ]
            if starts
            else list(shards)
            for index, shards in ends.items()
        }
        return _infer(graph, tables, lambda index: dense[str(index)], inputs)

    run = tf.function(infer, autograph=False)
    return lambda values, inputs, share=1.0: run(
        {str(i): v for i, v in enumerate(values) if i not in ends},
        inputs,
        tf.constant(share, tf.float32),
    )


_FREE_TIMEOUT_SECS, _FREE_POLL_SECS = 600.0, 0.02


class RemoteTeachers:
    """What the executions of a group need to know of its teachers.

    A `ServerTrainer` calls `arguments`, `on_worker` and `note`.
    """

    def __init__(self, teachers: Sequence[teacher_lib.Teacher]) -> None:
        """Takes the teachers before they are attached."""
        self._teachers = teachers
        self._copies: dict[str, ServerCopy] = {}
        # The standings in the execution that is being traced.
        self.standings: Any = None
        self._num_scheduled = self._num_done = 0
        self._swapped_at = 0

    # ---- on the coordinator ----

    def place(
        self,
        name: str,
        graph: student_graph.StudentGraph,
        values: saved_model.Snapshot | None = None,
    ) -> ServerCopy:
        """Makes a copy for the values of the teacher of a name."""
        self._copies[name] = ServerCopy(
            name, graph, values, wait_until_free=self._wait_until_free
        )
        return self._copies[name]

    def runner(self, graph: student_graph.StudentGraph) -> Any:
        """Returns what runs the student with the values of a snapshot."""
        return student_runner(graph)

    def show(self) -> None:
        """Passes the teachers' present state to executions from now on."""
        copies = [self._copies.get(each.name) for each in self._teachers]
        installs = [[copy.num_installs if copy else 0] for copy in copies]
        found = soft_targets.standings(self._teachers)
        self._arguments = np.hstack([found, np.reshape(installs, [-1, 1])])

    def arguments(self) -> tf.Tensor:
        """Returns what the next execution is to use, float64 `[teachers, 4]`.

        What `standings` returned, and how often each was put in use.
        """
        self._num_scheduled += 1
        return tf.constant(self._arguments)

    def note(self) -> None:
        """Notes that an execution has ended, in the order of scheduling."""
        self._num_done += 1

    def swapped(self) -> None:
        """Notes that executions from now on use other versions."""
        self._swapped_at = self._num_scheduled

    def _wait_until_free(self) -> None:
        deadline = time.monotonic() + _FREE_TIMEOUT_SECS
        while self._num_done < self._swapped_at:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    "An execution that uses the previous version didn't end "
                    f"within {_FREE_TIMEOUT_SECS:g} s."
                )
            time.sleep(_FREE_POLL_SECS)

    # ---- on a worker ----

    def on_worker(self, arguments: tf.Tensor) -> None:
        """Puts what `arguments` returned in force in the traced function."""
        self.standings = arguments[:, :3]
        for index, teacher in enumerate(self._teachers):
            if copy := self._copies.get(teacher.name):
                _, share, _, num_installs = tf.unstack(arguments[index])
                copy.use(share, num_installs)
