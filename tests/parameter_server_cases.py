"""A parameter-server group in one process, for tests of its single parts."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tfdistill import embedding
from tfdistill import keras_internals
from tfdistill import remote_step
from tfdistill import remote_update
from tfdistill import remote_variables
from tfdistill import worker_data

SIZES, DIM, NUM_FEATURES = (11, 5), 4, 3


class PerWorker:
    """An iterator for each worker."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __next__(self) -> Any:
        raise RuntimeError("Only workers read.")


class Result:
    """What a scheduled call returned or raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._error: Exception | None = None
        try:
            self._value = call()
        except Exception as error:
            self._error = error

    def get(self) -> Any:
        if self._error:
            raise self._error
        return self._value

    def fetch(self) -> Any:
        return self.get().numpy()


class Coordinator:
    """Runs each call at once; those that read data, on workers in turn."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, num_workers: int = 1
    ) -> None:
        self._num_reading = 0
        self._num_workers = num_workers
        self._worker = tf.Variable(0, dtype=tf.int64, trainable=False)
        monkeypatch.setattr(
            worker_data, "this_worker", lambda: tf.identity(self._worker)
        )

    def schedule(self, function: Any, args: Any = ()) -> Result:
        reads = any(_is_per_worker(a) for a in args)
        worker = self._num_reading % self._num_workers
        self._num_reading += reads
        self._worker.assign(worker)
        given = [a.values[worker] if _is_per_worker(a) else a for a in args]
        return Result(lambda: function(*given))

    def join(self) -> None:
        pass

    def create_per_worker_dataset(self, make: Callable[[], Any]) -> Any:
        return _PerWorkerDataset(self, make)

    def on_each_worker(self, call: Callable[[], Any]) -> list[Any]:
        found = []
        for worker in range(self._num_workers):
            self._worker.assign(worker)
            found.append(call())
        return found


def _is_per_worker(value: Any) -> bool:
    return isinstance(value, PerWorker)


class _PerWorkerDataset:
    def __init__(self, coordinator: Coordinator, make: Any) -> None:
        self._coordinator, self._make = coordinator, make
        self.element_spec = make().element_spec

    def __iter__(self) -> Any:
        made = self._coordinator.on_each_worker(lambda: iter(self._make()))
        return PerWorker(made)


def pretend(
    monkeypatch: pytest.MonkeyPatch, num_workers: int = 1
) -> Coordinator:
    """Makes models train as on parameter servers, on the `Coordinator`."""
    coordinator = Coordinator(monkeypatch, num_workers)
    # Every strategy is one of parameter servers from here on.
    monkeypatch.setattr(
        tf.distribute, "ParameterServerStrategy", tf.distribute.Strategy
    )
    jobs = {"worker": ["address"] * num_workers, "ps": ["address"] * 2}
    monkeypatch.setattr(keras_internals, "jobs_of", lambda strategy: jobs)
    monkeypatch.setattr(
        tf.distribute.coordinator,
        "ClusterCoordinator",
        lambda strategy: coordinator,
    )
    return coordinator


def student(*extra: keras.Layer, seed: int = 0) -> keras.Model:
    """A table for two fields beside features, `extra`, and a dense layer."""
    keras.utils.set_random_seed(seed)
    features = keras.Input((NUM_FEATURES,), name="features")
    ids = keras.Input((len(SIZES),), dtype="int64", name="ids")
    layer = embedding.ShardedEmbedding(
        SIZES, DIM, num_shards=2, seed=seed, name="table"
    )
    hidden = keras.layers.Concatenate()(
        [features, keras.layers.Flatten()(layer(ids))]
    )
    for one in extra:
        hidden = one(hidden)
    return keras.Model(
        {"features": features, "ids": ids}, keras.layers.Dense(1)(hidden)
    )


def data(num_examples: int = 24) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Inputs and targets 0 or 1 of `student`."""
    rng = np.random.default_rng(3)
    ids = [rng.integers(0, size, num_examples) for size in SIZES]
    x = {
        "features": rng.normal(size=[num_examples, NUM_FEATURES]),
        "ids": np.stack(ids, axis=1),
    }
    x["features"] = x["features"].astype("float32")
    y = (x["features"].sum(axis=1) + ids[1] > 2).astype("float32")
    return x, y[:, np.newaxis]


def batches(batch_size: int = 4, **kwargs: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(data(**kwargs)).batch(batch_size)


def model(
    built: keras.Model | None = None,
    optimizer: Any = None,
    *,
    metrics: Any = (),
    **kwargs: Any,
) -> tfdistill.CodistillModel:
    """A compiled model."""
    made = tfdistill.CodistillModel(student() if built is None else built)
    made.compile(
        optimizer or keras.optimizers.Adagrad(0.1),
        keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=list(metrics),
        **kwargs,
    )
    return made


def remote(*args: Any, **kwargs: Any) -> tfdistill.CodistillModel:
    """A compiled model, built as on parameter servers for `batches`."""
    made = model(*args, **kwargs)
    made.build_for(batches().element_spec)
    return made


def step_of(made: Any, *, trains: bool = True) -> Any:
    """Returns a model's step on a worker, and its variables."""
    found = remote_variables.RemoteVariables(made)
    update = (
        remote_update.RemoteUpdate(
            made.optimizer, found, tf.distribute.get_strategy()
        )
        if trains
        else None
    )
    return remote_step.RemoteStep(made, found, update), found, update


def weights(made: Any) -> list[np.ndarray]:
    """All of a student's weights; the tables' shards in one."""
    found = [v.numpy() for v in made.student.variables]
    num_shards = len(made.student.get_layer("table").shards)
    return [np.concatenate(found[:num_shards]), *found[num_shards:]]


def assert_same(actual: Any, expected: Any, **tolerance: float) -> None:
    """Compares lists of arrays."""
    tolerance = {"rtol": 1e-5, "atol": 1e-6, **tolerance}
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, **tolerance)
