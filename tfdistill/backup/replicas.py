"""All that training changes if replicas hold all variables: out and in again.

All workers read the same backup; only the chief writes, in the background.

Most of it is the same on all replicas: weights, the optimizer's slots. The
rest each replica has for itself: moving statistics, the states of random
generators, sums of metrics. All workers' parts travel to the chief in one small
collective, so that one task writes the complete state.
"""

import dataclasses
import itertools
import logging
from collections.abc import Callable
from collections.abc import Container
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistill.backup import interval
from tfdistill.backup import store as backup_store
from tfdistill.backup import warm_start
from tfdistill.cluster import replicas
from tfdistill.embedding import places
from tfdistill.embedding import tables
from tfdistill.exports import checkpoints
from tfdistill.exports import saved_model
from tfdistill.system import background
from tfdistill.system import keras_internals
from tfdistill.training import steps

_log = logging.getLogger(__name__)
# The longest wait for a backup at the end of training.
_FINISH_SECS = 600.0
# Collectives can carry these: each value as integers of the same width.
_BITS = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A state as it was between two steps; buffers are shared until then."""

    # What all replicas hold alike, and one value of each, by key.
    shared: dict[str, Any]
    own: dict[str, Any]


class ReplicaState:
    """The variables of a built and compiled model under any such strategy."""

    def __init__(
        self,
        model: keras.Model,
        kept: Mapping[str, steps.Stateful] | None = None,
    ) -> None:
        """Names the variables of a model that `fit` has prepared.

        `kept` has other objects with variables to keep, by name.
        """
        self._model = model
        self._strategy = model.distribute_strategy
        self._is_chief = replicas.is_chief(self._strategy)
        self._replicas = replicas.local_replicas(self._strategy)
        self._num_replicas = int(self._strategy.num_replicas_in_sync)
        trainable = list(model.trainable_variables)
        metrics = list(model.metrics_variables)
        self._columns = [
            table for table in tables.tables_of(model) if not table.is_trained
        ]
        ids = [shard for column in self._columns for shard in column.shards]
        known = {id(v) for v in (*trainable, *metrics, *ids)}
        others = [v for v in model.variables if id(v) not in known]
        self._trainable = _numbered("trainable", trainable)
        self._shared = {
            **self._trainable,
            **_numbered("optimizer", model.optimizer.variables),
            **_numbered("ids", ids),
        }
        for name, each in (kept or {}).items():
            self._shared |= _numbered(name, each.variables)
        for index, shard in enumerate(model.trainer.table_shards):
            for name, slot in shard.slots.items():
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

    def layout(self) -> dict[str, Any]:
        """Returns what a later training may begin with."""
        model, optimizer = self._model, self._model.optimizer
        keys = {id(v): k for k, v in {**self._shared, **self._own}.items()}
        weights = {id(v) for v in model.weights}
        parts: dict[tables.Table, dict[str, list[str]]] = {}
        of_tables = set()
        for index, shard in enumerate(self._model.trainer.table_shards):
            found = parts.setdefault(shard.table, {})
            of_tables.add(key := keys[id(shard.variable)])
            found.setdefault("", []).append(key)
            for name in shard.slots:
                found.setdefault(name, []).append(f"table/{index}/{name}")
        dense = {k: v for k, v in self._trainable.items() if k not in of_tables}
        return {
            "optimizer": type(keras_internals.inner(optimizer)).__name__,
            "carried": {
                "weights": {k: v.path for k, v in dense.items()},
                "others": {
                    k: v.path for k, v in self._own.items() if id(v) in weights
                },
                "slots": {
                    keys[id(v)]: v.path
                    for v in warm_start.slots_of(
                        optimizer, list(dense.values())
                    )
                },
            },
            "tables": [
                table.order | {"parts": list(found.values())}
                for table, found in parts.items()
            ],
            "embeddings": warm_start.keras_tables(model, keys),
        }

    # ---- out ----

    def snapshot(self) -> Snapshot:
        """Takes all current values; every worker calls it at the same step.

        Reading shares the variables' buffers, as
        `saved_model.SavedModelWriter.snapshot` says. Only the chief gets the
        values of `shared`.
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

        A weight that is NaN or infinite is a ValueError.
        """
        weights = {key: snapshot.shared[key] for key in self._trainable}
        saved_model.check_finite(
            list(weights.values()),
            [variable.path for variable in self._trainable.values()],
        )
        with tf.device("CPU:0"):
            own = {key: tf.stack(each) for key, each in snapshot.own.items()}
        checkpoints.write(
            f"{directory}/{backup_store.PREFIX}", {**snapshot.shared, **own}
        )

    # ---- in ----

    def read(self, directory: str) -> Snapshot:
        """Reads what `write` wrote; changes nothing."""
        reader = tf.train.load_checkpoint(f"{directory}/{backup_store.PREFIX}")
        return Snapshot(
            {key: reader.get_tensor(key) for key in self._shared},
            {key: reader.get_tensor(key) for key in self._own},
        )

    def assign(self, snapshot: Snapshot) -> None:
        """Assigns this worker's replicas their values, except metrics.

        If the number of replicas has changed, floats become the mean over the
        old replicas, and other values become the first replica's.
        """
        for key, variable in self._shared.items():
            for copy in self._copies(variable):
                copy.assign(snapshot.shared[key])
        for key, variable in self._own.items():
            if key not in self._metrics:
                self._assign_own(variable, snapshot.own[key])

    def begin_with(self, warm: warm_start.WarmStart) -> None:
        """Gives this worker's replicas the values of another training."""
        prefix = f"{warm.path}/{backup_store.PREFIX}"
        read = tf.train.load_checkpoint(prefix).get_tensor
        moved: dict[str, Any] = {}
        for move in warm.moves:
            moved |= move.values(
                read, lambda key: self._copies(self._shared[key])[0]
            )
        for key in (*moved, *warm.sources):
            value = moved[key] if key in moved else read(warm.sources[key])
            if key in self._own:
                # On servers there is one.
                by_replica = value.ndim > len(self._own[key].shape)
                self._assign_own(
                    self._own[key], value if by_replica else value[None]
                )
                continue
            for copy in self._copies(self._shared[key]):
                copy.assign(value)
        for column in self._columns:
            places.start_at(warm.step, column.slots)

    def assign_metrics(self, snapshot: Snapshot) -> None:
        """Gives the metrics the sums of an epoch in progress.

        If the number of replicas is another, they start again.
        """
        for key, variable in self._metrics.items():
            values = snapshot.own[key]
            if len(values) == self._num_replicas:
                self._assign_own(variable, values)

    def _assign_own(
        self, variable: keras.Variable | tf.Variable, values: np.ndarray
    ) -> None:
        if len(values) != self._num_replicas:
            is_float = tf.as_dtype(variable.dtype).is_floating
            value = values.mean(axis=0) if is_float else values[0]
            values = np.stack([value.astype(values.dtype)] * self._num_replicas)
        copies = self._copies(variable)
        for index, copy in zip(self._replicas, copies, strict=True):
            copy.assign(values[index])

    def _copies(
        self, variable: keras.Variable | tf.Variable
    ) -> tuple[Any, ...]:
        return self._strategy.experimental_local_results(_value(variable))


def _numbered(kind: str, variables: Iterable[Any]) -> dict[str, Any]:
    return {f"{kind}/{index}": v for index, v in enumerate(variables)}


def _value(variable: keras.Variable | tf.Variable) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable


def _as_bits(value: tf.Tensor) -> tf.Tensor:
    if value.dtype == tf.bool:
        return tf.cast(value, tf.int64)
    return tf.cast(tf.bitcast(value, _BITS[value.dtype.size]), tf.int64)


# Keras' own callbacks decide by these; weights that they keep are left out.
_ATTRIBUTES = (
    (keras.callbacks.EarlyStopping, ("wait", "best", "best_epoch")),
    (keras.callbacks.ReduceLROnPlateau, ("wait", "best", "cooldown_counter")),
    (keras.callbacks.ModelCheckpoint, ("best",)),
)


class _Counts:
    """What a callback of Keras has counted so far."""

    variables = ()

    def __init__(
        self, callback: keras.callbacks.Callback, names: Sequence[str]
    ) -> None:
        self._callback, self._names = callback, names

    def state(self) -> dict[str, Any]:
        found = {name: vars(self._callback).get(name) for name in self._names}
        return {
            name: value if isinstance(value, int) else float(value)
            for name, value in found.items()
            if value is not None
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        vars(self._callback).update(state)


class _Rows:
    """The logs of epochs, as `fit` returns them."""

    variables = ()

    def __init__(self, history: keras.callbacks.History) -> None:
        self._history = history

    def state(self) -> dict[str, Any]:
        rows = {
            name: [np.asarray(value).tolist() for value in values]
            for name, values in self._history.history.items()
        }
        return {"epochs": [*self._history.epoch], "rows": rows}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._history.epoch = [*state["epochs"]]
        self._history.history = {**state["rows"]}


def kept_of(
    callbacks: Sequence[keras.callbacks.Callback],
) -> dict[str, steps.Stateful]:
    """Returns what callbacks keep, by their keys in a backup.

    This package's callbacks declare their state; some of Keras' are known.
    """
    found: dict[str, steps.Stateful] = {}
    for callback in callbacks:
        key: str | None = None
        kept: list[steps.Stateful] = [
            _Counts(callback, names)
            for known, names in _ATTRIBUTES
            if isinstance(callback, known)
        ]
        if isinstance(callback, steps.SteppedCallback):
            key = callback.backup_key
            kept.append(callback)
        if isinstance(callback, keras.callbacks.History):
            kept.append(_Rows(callback))
        for each in kept:
            found[_free(key or type(callback).__name__, found)] = each
    return found


def _free(key: str, taken: Container[str]) -> str:
    """A key, or the first of `key.2`, `key.3` and so on that is not taken."""
    more = (f"{key}.{number}" for number in itertools.count(2))
    return next(k for k in itertools.chain([key], more) if k not in taken)


def by_present_keys(states: Mapping[str, Any]) -> dict[str, Any]:
    """Returns states as `kept_of` has them now.

    For several callbacks of a class, earlier versions wrote `Class/3`, with the
    number of all that is kept before it.
    """
    found = {key: each for key, each in states.items() if "/" not in key}
    earlier = [key.rpartition("/") for key in states.keys() - found.keys()]
    for key, _, number in sorted(earlier, key=lambda each: int(each[2])):
        found[_free(key, found)] = states[f"{key}/{number}"]
    return found


def states_of(kept: Mapping[str, steps.Stateful]) -> dict[str, Any]:
    """Returns what they keep, by name."""
    found = {name: each.state() for name, each in kept.items()}
    return {name: state for name, state in found.items() if state}


def set_states(
    kept: Mapping[str, steps.Stateful], states: Mapping[str, Any]
) -> None:
    """Gives them what `states_of` returned, if they are there again."""
    for name, each in kept.items():
        if name in states:
            each.restore(states[name])


class FitBackup(keras.callbacks.Callback):
    """The backups of one `fit`, before whose other callbacks it reads.

    With parameter servers, a backup is written while no step is in flight.

    Attributes:
        chosen: The one that training resumes from; None to start at step 0.
        interval: What they cost, and when they are due by that.
        num_skipped: Backups skipped while another was being written.
    """

    def __init__(
        self,
        store: backup_store.BackupStore,
        strategy: tf.distribute.Strategy,
        others: Sequence[keras.callbacks.Callback],
        warm_start_dir: str | None = None,
    ) -> None:
        """Chooses the backup to resume from; every worker calls it.

        Some of the `others` have a state and variables to keep. Without a
        backup, training begins with the newest one in `warm_start_dir`.
        """
        super().__init__()
        self._store, self._strategy, self._others = store, strategy, others
        self._on_servers = replicas.on_servers(strategy)
        self._worker: background.OneJobThread | None = None
        self._state: Any = None
        self._values: Snapshot | None = None
        # Objects with a state: of the model, and of callbacks.
        self._of_model: dict[str, steps.Stateful] = {}
        self._kept: dict[str, steps.Stateful] = {}
        self._gather = replicas.WorkerValues(strategy).gathered
        is_chief = replicas.is_chief(strategy)
        self.chosen = backup_store.choose(
            store, self._gather, is_chief=is_chief
        )
        self._warm: backup_store.Chosen | None = None
        if self.chosen is None and warm_start_dir is not None:
            self._warm = warm_start.choose(
                warm_start_dir, self._gather, is_chief=is_chief
            )
        self.interval = interval.YoungsInterval(self._gather)
        self.num_skipped = 0

    def on_train_begin(self, logs: steps.Logs | None = None) -> None:
        """Gives the model, which `fit` has prepared, the backup's values."""
        if self._on_servers:
            self._kept = kept_of(self._others)
            self._state = self.model.trainer.state()
        else:
            self._of_model = self.model.stateful()
            self._kept = self._of_model | kept_of(self._others)
            self._state = ReplicaState(self.model, self._kept)
            if replicas.is_chief(self._strategy):
                self._worker = background.OneJobThread(
                    "tfdistill-backup", job="backup"
                )
        if self.chosen is not None:
            self._resume(self.chosen)
        elif self._warm is not None:
            self._start_warm(self._warm)

    def _start_warm(self, other: backup_store.Chosen) -> None:
        warm = warm_start.planned(other, self._state)
        with backup_store.together(self._store, self._gather):
            self._state.begin_with(warm)
        _log.warning(
            "Starting at step 0 with the weights and the optimizer's slots "
            "from %s.",
            warm.path,
        )

    def _resume(self, chosen: backup_store.Chosen) -> None:
        version = chosen.version
        chosen.check_same(self._state)
        with backup_store.together(self._store, self._gather):
            values = self._state.read(version.path)
        self._state.assign(values)
        if not self._on_servers:
            self._values = values
            self._check_same_run(chosen.host)
        # A training that was over is not one that failed.
        if chosen.point.epoch < chosen.host.get("epochs", 0):
            self.interval.restore(chosen.host["interval"])
        states = self._states
        if lost := states.keys() - self._kept.keys():
            _log.warning(
                "The backup contains state of %s, which this script doesn't "
                "use. It is ignored.",
                ", ".join(sorted(lost)),
            )
        set_states(self._of_model, states)
        _log.warning(
            "Resuming from step %d of %s; skipping %d batches.",
            version.step,
            version.path,
            chosen.point.data.get("batches", 0),
        )

    def restore_callbacks(self) -> None:
        """Gives callbacks, which have begun, what they had in the backup."""
        set_states(kept_of(self._others), self._states)

    @property
    def _states(self) -> dict[str, Any]:
        """What the backup has of objects with a state, by their keys."""
        found = self.chosen.host["states"] if self.chosen else {}
        return by_present_keys(found)

    def on_epoch_begin(
        self, epoch: int, logs: steps.Logs | None = None
    ) -> None:
        """Gives the metrics, which Keras has just reset, their sums, once."""
        values, self._values = self._values, None
        if values is not None and self.chosen and self.chosen.point.batch:
            self._state.assign_metrics(values)

    def _check_same_run(self, host: dict[str, Any]) -> None:
        """Warns of what keeps a resumed training from being the same."""
        before = host["replicas"]
        now = int(self._strategy.num_replicas_in_sync)
        if before != now:
            _log.warning(
                "The backup was made with %d replicas, and now there are %d: "
                "batch statistics are averaged; random generators and the "
                "epoch's metrics start again.",
                before,
                now,
            )

    def take_backup(self, point: steps.TrainingPoint) -> Callable[[], None]:
        """Takes a snapshot; returns what writes it, for `write`.

        Every worker calls it at the same step. On servers it is written.
        """
        with self.interval.holding_up():
            host = self._host()
            snapshot = self._state.snapshot()
            if self._on_servers:
                self._save(snapshot, point, host)
        return lambda: self._save(snapshot, point, host)

    def write(
        self, save: Callable[[], None], *, step: int, wait: bool = False
    ) -> bool:
        """Lets a thread write what was taken at a step; returns if it will.

        While a backup is being written, the next is left out; `wait` waits for
        the earlier backup, and for this one.
        """
        if self._worker is None:
            return True
        limit = _FINISH_SECS if wait else 0.0
        submitted = self._worker.submit(save, wait_secs=limit)
        self.num_skipped += not submitted
        if wait and not self._worker.wait_idle(limit):
            _log.warning(
                "Step %d was not backed up within %.0f s; training continues.",
                step,
                limit,
            )
        return submitted

    def _host(self) -> dict[str, Any]:
        return {
            "states": states_of(self._kept),
            "replicas": int(self._strategy.num_replicas_in_sync),
            "epochs": self.params["epochs"],
            "interval": self.interval.state(),
        }

    def _save(
        self, snapshot: object, point: steps.TrainingPoint, host: dict[str, Any]
    ) -> None:
        with self.interval.writing():
            self._store.save(self._state, snapshot, point, host=host)

    def close(self) -> None:
        """Waits for a backup that is being written; ends the thread."""
        if self._worker is not None:
            self._worker.close(_FINISH_SECS)
            self._worker = None
