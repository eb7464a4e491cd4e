"""Small trainings that parameter servers must not change.

Each case is trained by one process and by a group of one worker, which takes
the same steps in the same order, and returns all that can be compared.

The peer's versions were published before, so that one process and a group of
one worker can learn from the same ones at the same steps.
"""

import dataclasses
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

Results = dict[str, np.ndarray]
FIELD_SIZES = [13, 5, 7]
BATCH_SIZE, NUM_EXAMPLES = 8, 43


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One training.

    Attributes:
        optimizer: Makes the optimizer.
        student: Makes the student.
        data: Makes features, labels and perhaps weights.
        steps_per_epoch: Steps of an epoch of repeated data; None for finite
            data, whose last batch is a partial one.
        steps_per_execution: In the group; one process takes single steps.
        from_function: Whether the data come from a function.
        callbacks: Makes callbacks.
        is_plain: Whether plain Keras is the reference; its optimizers move
            rows that a batch does not touch, where ours do not.
        wrap: Makes the model to train of the student.
        compiled: What else to compile with.
        teacher: Makes a model in memory to learn from, outside of any scope.
        tolerance: Largest difference.
    """

    optimizer: Callable[[], Any]
    student: Callable[[], keras.Model]
    data: Callable[[], tuple]
    steps_per_epoch: int | None = None
    steps_per_execution: int = 5
    from_function: bool = False
    callbacks: Callable[[], list] = list
    is_plain: bool = True
    wrap: Callable[[keras.Model], keras.Model] = tfdistill.CodistillModel
    compiled: dict = dataclasses.field(default_factory=dict)
    teacher: Callable[[], keras.Model] | None = None
    tolerance: float = 2e-6


def numbers() -> tuple[np.ndarray, np.ndarray]:
    """Features `[n, 5]` and targets `[n, 1]`."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=(NUM_EXAMPLES, 5)).astype("float32")
    return x, (x @ rng.normal(size=(5, 1)) > 0).astype("float32")


def weighted() -> tuple:
    """The same with sample weights."""
    weights = np.random.default_rng(8).uniform(0, 3, NUM_EXAMPLES)
    return *numbers(), weights.astype("float32")


def clicks() -> tuple[dict, np.ndarray]:
    """Numbers and the ids of several fields."""
    rng = np.random.default_rng(9)
    x, y = numbers()
    ids = [rng.integers(0, size, NUM_EXAMPLES) for size in FIELD_SIZES]
    return {"x": x, "ids": np.stack(ids, axis=1)}, y


def bags() -> tuple[tf.RaggedTensor, np.ndarray]:
    """Bags of ids, some empty, some with ids that are out of range."""
    rng = np.random.default_rng(10)
    lengths = rng.integers(0, 5, NUM_EXAMPLES)
    ids = rng.integers(-2, 25, lengths.sum())
    return tf.RaggedTensor.from_row_lengths(ids, lengths), numbers()[1]


def dense(**options: Any) -> keras.Model:
    """A student of dense layers; `options` are the first one's."""
    inputs = keras.Input((5,))
    options = {"units": 6, "activation": "tanh", **options}
    hidden = keras.layers.Dense(**options)(inputs)
    return keras.Model(inputs, keras.layers.Dense(1)(hidden))


def normalized() -> keras.Model:
    """A student with statistics of its batches."""
    inputs = keras.Input((5,))
    hidden = keras.layers.BatchNormalization(momentum=0.7)(inputs)
    hidden = keras.layers.Dense(6, activation="relu")(hidden)
    return keras.Model(inputs, keras.layers.Dense(1)(hidden))


def regularized() -> keras.Model:
    return dense(kernel_regularizer=keras.regularizers.L2(0.1))


def click_student() -> keras.Model:
    """A student with a table of several fields and dictionaries as inputs."""
    x = keras.Input((5,), name="x")
    ids = keras.Input((len(FIELD_SIZES),), dtype="int64", name="ids")
    rows = tfdistill.layers.ShardedEmbedding(FIELD_SIZES, 4)(ids)
    both = keras.layers.Concatenate()([x, keras.layers.Flatten()(rows)])
    hidden = keras.layers.Dense(6, activation="tanh")(both)
    return keras.Model({"x": x, "ids": ids}, keras.layers.Dense(1)(hidden))


def bag_student() -> keras.Model:
    """A student of bags; ids that are out of range are id 3."""
    ids = keras.Input((None,), dtype="int64", ragged=True)
    table = tfdistill.layers.ShardedEmbedding(
        20, 4, combiner="mean", oov_index=3
    )
    return keras.Model(ids, keras.layers.Dense(1)(table(ids)))


def penalized() -> keras.Model:
    """A finished model of a table and a loss of its own."""
    inputs = keras.Input((len(FIELD_SIZES),), dtype="int64", name="ids")
    rows = keras.layers.Embedding(max(FIELD_SIZES), 4)(inputs)
    hidden = keras.layers.Flatten()(rows)
    return training_cases.Penalized(
        {"ids": inputs}, keras.layers.Dense(1)(hidden)
    )


def ids_only() -> tuple:
    x, y = clicks()
    return {"ids": x["ids"]}, y


def _decay(rate: float) -> Any:
    return keras.optimizers.schedules.ExponentialDecay(rate, 3, 0.7)


def _rates() -> list:
    return [keras.callbacks.LearningRateScheduler(lambda e: [0.2, 0.03][e])]


CASES: dict[str, Case] = {
    "momentum": Case(
        optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        student=dense,
        data=numbers,
        steps_per_epoch=7,
        callbacks=_rates,
        compiled={"metrics": ["mae", "AUC"]},
    ),
    "adagrad": Case(
        optimizer=lambda: keras.optimizers.Adagrad(0.1),
        student=click_student,
        data=clicks,
        steps_per_epoch=8,
        steps_per_execution=1,
        compiled={"metrics": ["mae"]},
    ),
    "lazy_adam": Case(
        optimizer=lambda: keras.optimizers.Adam(
            _decay(0.02), global_clipnorm=0.1
        ),
        student=click_student,
        data=clicks,
        is_plain=False,
        compiled={"metrics": ["mae"]},
        tolerance=2e-5,
    ),
    "ftrl": Case(
        optimizer=lambda: keras.optimizers.Ftrl(0.2),
        student=regularized,
        data=numbers,
        from_function=True,
        steps_per_execution=1,
    ),
    "ftrl_bags": Case(
        optimizer=lambda: keras.optimizers.Ftrl(0.2),
        student=bag_student,
        data=bags,
        is_plain=False,
    ),
    "wrapped_own_loss": Case(
        optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        student=penalized,
        data=ids_only,
        wrap=tfdistill.DistributedModel,
        compiled={"metrics": ["mae"]},
    ),
    "taught_in_memory": Case(
        optimizer=lambda: keras.optimizers.Adagrad(0.1),
        student=lambda: dense(name="own"),
        data=weighted,
        is_plain=False,
        teacher=lambda: dense(name="theirs", units=8),
        compiled={
            "distillation_loss": (
                tfdistill.losses.BinarySoftTargetCrossEntropy()
            ),
        },
    ),
    "sample_weight": Case(
        optimizer=lambda: keras.optimizers.Adagrad(0.1),
        student=normalized,
        data=weighted,
        from_function=True,
        compiled={"metrics": ["mae"], "weighted_metrics": ["mse"]},
    ),
}


def _source(case: Case, *, repeats: bool, strategy: Any) -> Any:
    def make(context: Any) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices(case.data())
        dataset = dataset.batch(BATCH_SIZE).shard(
            context.num_input_pipelines, context.input_pipeline_id
        )
        return dataset.repeat() if repeats else dataset

    on_servers = isinstance(strategy, tf.distribute.ParameterServerStrategy)
    if case.from_function and on_servers:
        return make
    return make(tf.distribute.InputContext())


def run(case: Case, strategy: Any, *, is_reference: bool = False) -> Results:
    """Trains one case and returns all that must be equal."""
    keras.utils.set_random_seed(3)
    models = [case.teacher()] if case.teacher else []
    feature_loss = tfdistill.losses.FeatureDistillation(
        [("own", "theirs")], projection=True
    )
    taught = {"feature_loss": feature_loss} if models else {}
    with strategy.scope():
        student = model = case.student()
        if not (is_reference and case.is_plain):
            teachers = list(map(tfdistill.teachers.FixedTeacher, models))
            model = (
                tfdistill.CodistillModel(student, teachers=teachers)
                if models
                else case.wrap(student)
            )
        model.compile(
            case.optimizer(),
            keras.losses.BinaryCrossentropy(from_logits=True),
            steps_per_execution=1 if is_reference else case.steps_per_execution,
            jit_compile=False,
            **case.compiled,
            **taught,
        )
    repeats = case.steps_per_epoch is not None
    finite = _source(case, repeats=False, strategy=strategy)
    history = model.fit(
        _source(case, repeats=repeats, strategy=strategy),
        epochs=2,
        steps_per_epoch=case.steps_per_epoch,
        validation_data=finite,
        callbacks=case.callbacks(),
        shuffle=False,
        verbose=0,
    )
    found = model.evaluate(finite, verbose=0, return_dict=True)
    results = {f"log_{k}": np.array(v) for k, v in history.history.items()}
    results |= {f"eval_{k}": np.array(v) for k, v in found.items()}
    results |= {f"weight_{k}": v for k, v in student_weights(student).items()}
    results["prediction"] = np.asarray(model.predict(finite, verbose=0))
    results["iterations"] = model.optimizer.iterations.numpy()
    return results


def student_weights(student: keras.Model) -> Results:
    """Returns a student's weights by index, tables whole."""
    found = embedding_layer.variables_of(student)
    return {str(i): np.asarray(v.value) for i, v in enumerate(found)}


def assert_equal(actual: Results, expected: Results, tolerance: float) -> None:
    """Compares; ours may log more than plain Keras does, never less."""
    assert not expected.keys() - actual.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(
            actual[name],
            value,
            rtol=max(tolerance * 10, 1e-5),
            atol=tolerance,
            err_msg=name,
        )


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
        self._num_reading = self.num_connections = self.num_joins = 0
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


def student(*extra: keras.Layer, seed: int = 0) -> keras.Model:
    """A table for two fields beside features, `extra`, and a dense layer."""
    keras.utils.set_random_seed(seed)
    features = keras.Input((NUM_FEATURES,), name="features")
    ids = keras.Input((len(SIZES),), dtype="int64", name="ids")
    layer = embedding_layer.ShardedEmbedding(
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
    kind: type = tfdistill.CodistillModel,
    **kwargs: Any,
) -> tfdistill.CodistillModel:
    """A compiled model."""
    made = kind(student() if built is None else built)
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


def step_of(made: Any) -> Any:
    """Returns the step on a worker of a `remote` model, and its variables."""
    found = made.trainer.known_variables
    return worker_lib.RemoteStep(made, found), found, made.trainer.update


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


VERSIONS = (10, 20)
NUM_EPOCHS, NUM_STEPS = 3, 7
# A backup is due after 10 steps, and taken once the execution of 5 steps that
# is in flight by then has ended.
BACKUP_STEPS, BACKED_UP_STEPS, RESUMED_STEPS = 10, 15, 30


class TracedModel(tfdistill.CodistillModel):
    """Keeps the graphs that its training step was traced in."""

    def train_step(self, data: Any) -> Any:
        """Notes the graph."""
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
    remotes = [teacher.remote for teacher in model.teachers]
    return [v for remote in remotes for v in remote._masters.values()]


def _data() -> tf.data.Dataset:
    dataset = tf.data.Dataset.from_tensor_slices(clicks())
    return dataset.repeat().batch(BATCH_SIZE)


def _loss() -> keras.losses.Loss:
    return keras.losses.BinaryCrossentropy(from_logits=True)


def publish(directory: pathlib.Path) -> None:
    """Publishes two versions of a peer that trains in one process."""
    keras.utils.set_random_seed(11)
    peer = tfdistill.CodistillModel(click_student())
    peer.compile(keras.optimizers.Adagrad(0.3), _loss())
    for step in VERSIONS:
        exporter = tfdistill.callbacks.StudentExporter(
            tfdistill.Exchange(directory / f"kept_{step}"),
            every_steps=1000,
            group=1,
        )
        peer.fit(
            _data(),
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
            click_student(),
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
    results |= student_weights(model.student)
    x, y = clicks()
    given = tf.data.Dataset.from_tensor_slices((x, y)).batch(20)
    results["prediction"] = np.asarray(model.predict(given, verbose=0))
    return results, model, teaching


class _StopTraining(Exception):
    """Ends `fit` as a crash would."""


class _Crash(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 > BACKED_UP_STEPS:
            raise _StopTraining


class _Begin(keras.callbacks.Callback):
    """Notes what training begins with."""

    def on_train_begin(self, logs=None):
        self.weights = student_weights(self.model.student)
        self.step = int(self.model.optimizer.iterations.numpy())


def _plain_model(strategy: Any, seed: int) -> tfdistill.CodistillModel:
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = tfdistill.CodistillModel(click_student())
        model.compile(
            keras.optimizers.Adam(0.02), _loss(), steps_per_execution=5
        )
    return model


def crash_and_resume(directory: pathlib.Path, strategy: Any) -> dict:
    """Is cut off after a backup, and goes on with another model."""
    fit = {"epochs": 2, "steps_per_epoch": RESUMED_STEPS, "verbose": 0}

    def backup() -> tfdistill.callbacks.Backup:
        return tfdistill.callbacks.Backup(directory, every_steps=BACKUP_STEPS)

    try:
        _plain_model(strategy, 3).fit(
            _data(), callbacks=[backup(), _Crash()], **fit
        )
    except _StopTraining:
        pass
    begin = _Begin()
    model = _plain_model(strategy, 4)
    history = model.fit(_data(), callbacks=[backup(), begin], **fit)
    return {
        "step": begin.step,
        "epochs": np.array(history.epoch),
        "loss": np.array(history.history["loss"]),
        "iterations": model.optimizer.iterations.numpy(),
        **{f"begin_{k}": v for k, v in begin.weights.items()},
        **{f"end_{k}": v for k, v in student_weights(model.student).items()},
    }


def resume_by_hand() -> dict:
    """What `crash_and_resume` must come to: its data start anew."""
    model = _plain_model(tf.distribute.get_strategy(), 3)

    def fit(epochs: int) -> list[float]:
        history = model.fit(
            _data(),
            epochs=epochs,
            steps_per_epoch=BACKED_UP_STEPS,
            shuffle=False,
            verbose=0,
        )
        return history.history["loss"]

    # Halves of the two epochs.
    losses = fit(1)
    begin = student_weights(model.student)
    losses += fit(3)
    return {
        "step": BACKED_UP_STEPS,
        "epochs": np.array([0, 1]),
        "loss": np.reshape(losses, [2, -1]).mean(axis=1),
        "iterations": 2 * RESUMED_STEPS,
        **{f"begin_{k}": v for k, v in begin.items()},
        **{f"end_{k}": v for k, v in student_weights(model.student).items()},
    }
