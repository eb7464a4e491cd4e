"""Parameter servers in one process, and trainings that they must not change.

The peer's versions were published before, so that one process and a group of
one worker can learn from the same ones at the same steps.
"""

import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as codistillation_cases
from tests.cases import training as training_cases
from tfdistill.embedding import layer as embedding_layer
from tfdistill.parameter_server import trainer
from tfdistill.parameter_server import worker as worker_lib
from tfdistill.parameter_server import worker_data
from tfdistill.system import keras_internals

SIZES, DIM, NUM_FEATURES = (11, 5), 4, 3


class PerWorker:
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
        self._num_reading = self.num_connections = self.num_joins = 0
        self._num_workers = num_workers
        self.strategy = tf.distribute.get_strategy()
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
        self.num_joins += 1

    def connect(self, strategy: Any) -> "Coordinator":
        self.num_connections += 1
        return self

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
        tf.distribute.coordinator, "ClusterCoordinator", coordinator.connect
    )
    return coordinator


def student(
    *extra: keras.Layer, seed: int = 0, num_shards: int = 2
) -> keras.Model:
    """A table for two fields beside features, `extra`, and a dense layer."""
    keras.utils.set_random_seed(seed)
    features = keras.Input((NUM_FEATURES,), name="features")
    ids = keras.Input((len(SIZES),), dtype="int64", name="ids")
    layer = embedding_layer.ShardedEmbedding(
        SIZES,
        DIM,
        embeddings_initializer=keras.initializers.RandomUniform(seed=seed),
        num_shards=num_shards,
        name="table",
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
    kind: type = tfdistill.CodistillModel,
    teachers: Any = None,
    **kwargs: Any,
) -> tfdistill.CodistillModel:
    made = kind(student() if built is None else built, teachers=teachers)
    if teachers is not None:
        loss = tfdistill.losses.BinarySoftTargetCrossEntropy()
        kwargs.setdefault("distillation_loss", loss)
    made.compile(
        optimizer or keras.optimizers.Adagrad(0.1),
        keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=list(metrics),
        **kwargs,
    )
    return made


class OnServers(tfdistill.CodistillModel):
    """Trains as on parameter servers, whatever the strategy."""

    @property
    def trainer(self) -> trainer.ServerTrainer:
        """Connects to nobody, unless it is asked to `fit`."""
        if self._trainer is None:
            self._trainer = trainer.ServerTrainer(self)
        return self._trainer


def remote(*args: Any, **kwargs: Any) -> tfdistill.CodistillModel:
    """A compiled model, built as on parameter servers for `batches`."""
    made = model(*args, kind=OnServers, **kwargs)
    made.trainer.build(batches().element_spec)
    return made


def backed_up(
    made: Any, directory: Any, **kwargs: Any
) -> tfdistill.callbacks.Backup:
    """Returns a backup whose `fit` of a `remote` model has begun."""
    backup = tfdistill.callbacks.Backup(directory, **kwargs)
    backup.begin_fit(made, [])
    backup.begun.set_model(made)
    backup.begun.set_params({"epochs": 9})
    backup.begun.on_train_begin()
    return backup


def step_of(made: Any) -> Any:
    """Returns the step on a worker of a `remote` model, and its variables."""
    found = made.trainer.known_variables
    return worker_lib.RemoteStep(made, found), found, made.trainer.update


def weights(made: Any) -> list[np.ndarray]:
    found = [v.numpy() for v in made.student.variables]
    num_shards = len(made.student.get_layer("table").shards)
    return [np.concatenate(found[:num_shards]), *found[num_shards:]]


def assert_same(actual: Any, expected: Any, **tolerance: float) -> None:
    tolerance = {"rtol": 1e-5, "atol": 1e-6, **tolerance}
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, **tolerance)


VERSIONS = (10, 20)
NUM_EPOCHS, NUM_STEPS = 3, 7


class TracedModel(tfdistill.CodistillModel):
    """Keeps the graphs that its training step was traced in."""

    def train_step(self, data: Any) -> Any:
        self.note_graph(tf.compat.v1.get_default_graph())
        return super().train_step(data)


class Teaching(keras.callbacks.Callback):
    """Has version 10 in force from the first step, 20 after an epoch."""

    def __init__(self, directory: pathlib.Path) -> None:
        super().__init__()
        self._directory = directory
        self.graphs: list = []
        self.num_traced: list = []

    def on_train_begin(self, logs=None):
        self.model.note_graph = self.graphs.append
        self._load(VERSIONS[0])

    def on_epoch_begin(self, epoch, logs=None):
        remote = self.model.teachers.remote
        if epoch == 2 and remote:
            # The worker has what it needs by now and must not ask again.
            for master in masters(self.model):
                master.assign(np.full(master.shape, np.nan, "float32"))

    def on_epoch_end(self, epoch, logs=None):
        self.num_traced.append(len(self.graphs))
        if epoch == 0:
            self._load(VERSIONS[1])

    def _load(self, step: int) -> None:
        target = self._directory / "exchange" / "group_1" / str(step)
        target.parent.mkdir(parents=True, exist_ok=True)
        kept = self._directory / f"kept_{step}" / "group_1" / str(step)
        kept.rename(target)
        codistillation_cases.load(self.model, step)


def masters(model: tfdistill.CodistillModel) -> list[tf.Variable]:
    """The servers' copies of the teachers' dense weights."""
    copies = [teacher._copy for teacher in model.teachers]
    return [v for copy in copies for v in copy._masters.values()]


def _data(*, backwards: bool = False) -> tf.data.Dataset:
    data: Any = training_cases.clicks()
    if backwards:
        data = keras.tree.map_structure(lambda each: each[::-1], data)
    dataset = tf.data.Dataset.from_tensor_slices(data)
    return dataset.repeat().batch(training_cases.BATCH_SIZE)


def _loss() -> keras.losses.Loss:
    return keras.losses.BinaryCrossentropy(from_logits=True)


def publish(directory: pathlib.Path) -> None:
    """Publishes two versions of a peer that trains in one process.

    It meets the ids in another order, so they have other rows in its table. The
    second version is quantized.
    """
    keras.utils.set_random_seed(11)
    peer = tfdistill.CodistillModel(training_cases.dynamic_student())
    peer.compile(keras.optimizers.Adagrad(0.3), _loss())
    for step in VERSIONS:
        exporter = tfdistill.callbacks.StudentExporter(
            tfdistill.Exchange(directory / f"kept_{step}"),
            every_steps=1000,
            group=1,
            variables_dtype="int8" if step == VERSIONS[1] else None,
        )
        peer.fit(
            _data(backwards=True),
            steps_per_epoch=10,
            verbose=0,
            shuffle=False,
            callbacks=[exporter],
        )


def learn(directory: pathlib.Path, strategy: Any) -> tuple[dict, Any, Any]:
    """Trains with what `publish` left in the directory; exports at the end.

    Returns:
        What must not depend on the strategy, the model and the callback.
    """
    exchange = tfdistill.Exchange(directory / "exchange", key=None)
    keras.utils.set_random_seed(3)
    on_servers = isinstance(strategy, tf.distribute.ParameterServerStrategy)
    with strategy.scope():
        model = TracedModel(
            training_cases.dynamic_student(),
            teachers=tfdistill.teachers.Peers(exchange, peers=[1]),
        )
        model.compile(
            keras.optimizers.Adagrad(0.1),
            _loss(),
            distillation_loss=tfdistill.losses.BinarySoftTargetCrossEntropy(),
            distillation_weight=tfdistill.schedules.BurnIn(steps=3, weight=0.7),
            steps_per_execution=5 if on_servers else 1,
        )
    teaching = Teaching(directory)
    history = model.fit(
        _data(),
        epochs=NUM_EPOCHS,
        steps_per_epoch=NUM_STEPS,
        shuffle=False,
        verbose=0,
        callbacks=[
            codistillation_cases.never(),
            tfdistill.callbacks.StudentExporter(
                exchange, every_steps=1000, group=0
            ),
            teaching,
        ],
    )
    results = {f"log_{k}": np.array(v) for k, v in history.history.items()}
    results |= training_cases.student_weights(model.student)
    x, y = training_cases.clicks()
    given = tf.data.Dataset.from_tensor_slices((x, y)).batch(20)
    results["prediction"] = np.asarray(model.predict(given, verbose=0))
    return results, model, teaching
