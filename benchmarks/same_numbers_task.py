"""The small trainings whose weights `benchmarks.same_numbers` compares.

Every task of a place runs all of the place's cases and writes what it found
as JSON. Public names only, so that the same file runs on any release.
"""

import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import app
from absl import flags

import tfdistill

TEACHERS = "teachers"
# Place to the number of devices of each of its tasks.
DEVICES = {
    TEACHERS: 1,
    "one_device": 1,
    "two_replicas": 2,
    "two_workers": 2,
    "one_ps": 1,
}
# Groups that publish the teachers, and the steps of their versions.
_CLASSIFIER, _CLICKS = 1, 2
_STEPS = (4, 8)
_FIELD_SIZES = (13, 5, 7)
_BATCH_SIZE, _NUM_EXAMPLES, _EPOCHS = 8, 27, 2

Found = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One training.

    Attributes:
        student: Makes the student.
        data: Makes features, labels and perhaps weights.
        optimizer: Makes the optimizer.
        loss: Makes the task loss.
        compiled: What else to compile with.
        fit: What else to fit with.
        distillation_loss: Makes the loss of a codistilled case.
        fixed: Whether published versions are its fixed teachers.
        peer: The group whose version is its teacher.
        is_wrapped: Whether a CodistillModel trains it; if not, a model of
            `MultiWorkerTraining` does.
    """

    student: Callable[[type], keras.Model]
    data: Callable[[], tuple]
    optimizer: Callable[[], Any] = lambda: keras.optimizers.SGD(0.1)
    loss: Callable[[], Any] = lambda: "mse"
    compiled: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fit: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    distillation_loss: Callable[[], Any] | None = None
    fixed: bool = False
    peer: int | None = None
    is_wrapped: bool = False


def digest(values: Iterable[np.ndarray]) -> str:
    """Returns a SHA-256 over dtypes, shapes and bytes, in order."""
    found = hashlib.sha256()
    for value in map(np.ascontiguousarray, values):
        found.update(f"{value.dtype.str}{value.shape}".encode())
        found.update(value.tobytes())
    return found.hexdigest()


def digest_of_file(path: pathlib.Path) -> str:
    """Returns the digest of the weights of a `.keras` file."""
    # Keras finds the class once the package has resolved its name.
    custom = {"ShardedEmbedding": tfdistill.ShardedEmbedding}
    student = keras.saving.load_model(path, custom, compile=False)
    return digest(map(np.asarray, student.get_weights()))


# ---- data ----


def _numbers(number: int = _NUM_EXAMPLES) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(7)
    x = rng.normal(size=(number, 5)).astype("float32")
    return x, (x @ rng.normal(size=(5, 1)) + 0.1).astype("float32")


def _weighted() -> tuple:
    weights = np.random.default_rng(8).uniform(0, 3, _NUM_EXAMPLES)
    return *_numbers(), weights.astype("float32")


def _classes(number: int = _NUM_EXAMPLES) -> tuple[np.ndarray, np.ndarray]:
    x, y = _numbers(number)
    return x, np.abs(y[:, 0] * 3).astype("int64") % 3


def _binary() -> tuple[np.ndarray, np.ndarray]:
    x, y = _numbers()
    return x, (y > 0).astype("float32")


def _clicks() -> tuple[dict, np.ndarray]:
    rng = np.random.default_rng(9)
    x, y = _binary()
    ids = [rng.integers(0, size, _NUM_EXAMPLES) for size in _FIELD_SIZES]
    return {"x": x, "ids": np.stack(ids, axis=1)}, y


def _sequences() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(11)
    tokens = rng.integers(1, 20, (_NUM_EXAMPLES, 6)).astype("int32")
    for row, length in enumerate(rng.integers(1, 7, _NUM_EXAMPLES)):
        tokens[row, length:] = 0
    return tokens, np.roll(tokens, -1, axis=1)


def _dictionaries() -> tuple[dict, dict]:
    x, y = _numbers()
    return {"a": x, "b": x[:, :2] ** 2}, {"value": y, "kind": _classes()[1]}


# ---- students ----


def _dense(model_class: type, units: int = 1) -> keras.Model:
    inputs = keras.Input((5,))
    hidden = keras.layers.Dense(7, activation="tanh")(inputs)
    return model_class(inputs, keras.layers.Dense(units)(hidden))


def _classifier(model_class: type) -> keras.Model:
    """With statistics, random numbers and a regularizer."""
    inputs = keras.Input((5,))
    hidden = keras.layers.Dense(
        7, activation="relu", kernel_regularizer=keras.regularizers.L2(0.01)
    )(inputs)
    hidden = keras.layers.BatchNormalization(momentum=0.7)(hidden)
    hidden = keras.layers.Dropout(0.2, seed=3)(hidden)
    return model_class(inputs, keras.layers.Dense(3)(hidden))


def _click_student(model_class: type) -> keras.Model:
    x = keras.Input((5,), name="x")
    ids = keras.Input((len(_FIELD_SIZES),), dtype="int64", name="ids")
    rows = tfdistill.ShardedEmbedding(list(_FIELD_SIZES), 4, num_shards=2)(ids)
    both = keras.layers.Concatenate()([x, keras.layers.Flatten()(rows)])
    hidden = keras.layers.Dense(6, activation="tanh")(both)
    outputs = keras.layers.Dense(1)(hidden)
    return model_class({"x": x, "ids": ids}, outputs)


def _plain_table(model_class: type) -> keras.Model:
    inputs = keras.Input((6,), dtype="int32")
    rows = keras.layers.Embedding(20, 4, mask_zero=True)(inputs)
    hidden = keras.layers.LSTM(5, return_sequences=True)(rows)
    return model_class(inputs, keras.layers.Dense(20)(hidden))


def _two_outputs(model_class: type) -> keras.Model:
    a, b = keras.Input((5,), name="a"), keras.Input((2,), name="b")
    joined = keras.layers.Concatenate()([a, b])
    hidden = keras.layers.Dense(6, activation="relu")(joined)
    outputs = {
        "value": keras.layers.Dense(1, name="value")(hidden),
        "kind": keras.layers.Dense(3, name="kind")(hidden),
    }
    return model_class({"a": a, "b": b}, outputs)


# ---- cases ----


def _sparse() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _crossentropy() -> keras.losses.Loss:
    return keras.losses.BinaryCrossentropy(from_logits=True)


def _falling(rate: float) -> Any:
    return keras.optimizers.schedules.ExponentialDecay(rate, 3, 0.7)


def _lars() -> Any:
    return tfdistill.LARS(
        0.1, trust_coefficient=0.1, weight_decay=0.01, nesterov=True
    )


_OPTIMIZERS = keras.optimizers
_TAUGHT: dict[str, Any] = {
    "student": _classifier,
    # The last batch has one for each of four replicas: the statistics of a
    # share without examples are NaN.
    "data": functools.partial(_classes, _NUM_EXAMPLES + 1),
    "loss": _sparse,
    "is_wrapped": True,
}
_CLICK: dict[str, Any] = {
    "student": _click_student,
    "data": _clicks,
    "loss": _crossentropy,
}

_REPLICATED: dict[str, Case] = {
    "adam": Case(
        student=_dense,
        data=_numbers,
        optimizer=lambda: _OPTIMIZERS.Adam(_falling(0.01)),
    ),
    "momentum_clipped_by_global_norm": Case(
        student=_dense,
        data=_numbers,
        optimizer=lambda: _OPTIMIZERS.SGD(
            0.3, momentum=0.5, global_clipnorm=0.05
        ),
    ),
    "adamw_clipped_by_norm": Case(
        student=_dense,
        data=_numbers,
        optimizer=lambda: _OPTIMIZERS.AdamW(0.01, clipnorm=0.05, use_ema=True),
    ),
    "lars": Case(student=_dense, data=_numbers, optimizer=_lars),
    "sample_weight_clipped_by_value": Case(
        student=_dense,
        data=_weighted,
        optimizer=lambda: _OPTIMIZERS.SGD(0.3, clipvalue=0.01),
        compiled={"weighted_metrics": ["mse"]},
    ),
    "class_weight": Case(
        student=functools.partial(_dense, units=3),
        data=_classes,
        loss=_sparse,
        fit={"class_weight": {0: 1.0, 1: 2.0, 2: 0.5}},
    ),
    "dictionaries": Case(
        student=_two_outputs,
        data=_dictionaries,
        loss=lambda: {"value": "mse", "kind": _sparse()},
        compiled={"loss_weights": {"value": 0.5, "kind": 2.0}},
    ),
    "steps_per_execution": Case(
        student=_dense, data=_numbers, compiled={"steps_per_execution": 3}
    ),
    "masked_sequence": Case(
        student=_plain_table,
        data=_sequences,
        loss=_sparse,
        optimizer=lambda: _OPTIMIZERS.Adagrad(0.1),
    ),
    "table_adam": Case(**_CLICK, optimizer=lambda: _OPTIMIZERS.Adam(0.01)),
    "table_adagrad_executions": Case(
        **_CLICK,
        optimizer=lambda: _OPTIMIZERS.Adagrad(0.1, global_clipnorm=0.1),
        compiled={"steps_per_execution": 3},
    ),
    "taught_by_files": Case(
        **_TAUGHT,
        fixed=True,
        optimizer=lambda: _OPTIMIZERS.Adam(0.01),
        distillation_loss=lambda: tfdistill.losses.SoftTargetCrossEntropy(
            temperature=2.0
        ),
    ),
    "taught_by_peer": Case(
        **_TAUGHT,
        peer=_CLASSIFIER,
        optimizer=lambda: _OPTIMIZERS.SGD(0.1, momentum=0.9),
        distillation_loss=tfdistill.losses.ForwardKL,
        compiled={"steps_per_execution": 2},
    ),
    "clicks_taught_by_peer": Case(
        **_CLICK,
        is_wrapped=True,
        peer=_CLICKS,
        optimizer=lambda: _OPTIMIZERS.Adagrad(0.1),
        distillation_loss=tfdistill.losses.BinarySoftTargetCrossEntropy,
    ),
}

_SERVED: dict[str, Case] = {
    "momentum": Case(
        student=_dense,
        data=_binary,
        loss=_crossentropy,
        optimizer=lambda: _OPTIMIZERS.SGD(0.1, momentum=0.9),
        is_wrapped=True,
    ),
    "sample_weight": Case(
        student=_dense,
        data=_weighted,
        optimizer=lambda: _OPTIMIZERS.Adagrad(0.1),
        compiled={"weighted_metrics": ["mse"], "steps_per_execution": 3},
        is_wrapped=True,
    ),
    "table_adam": Case(
        **_CLICK,
        optimizer=lambda: _OPTIMIZERS.Adam(_falling(0.02), global_clipnorm=0.1),
        compiled={"steps_per_execution": 5},
        is_wrapped=True,
    ),
    "table_ftrl": Case(
        **_CLICK, optimizer=lambda: _OPTIMIZERS.Ftrl(0.2), is_wrapped=True
    ),
    "clicks_taught_by_peer": _REPLICATED["clicks_taught_by_peer"],
}


def cases_of(place: str) -> dict[str, Case]:
    """Returns the cases of a place by name.

    Args:
        place: One of `DEVICES`.
    """
    if place == TEACHERS:
        return {
            "classifier": Case(**_TAUGHT),
            "clicks": Case(
                **_CLICK,
                is_wrapped=True,
                optimizer=lambda: _OPTIMIZERS.Adagrad(0.1),
            ),
        }
    return _SERVED if place == "one_ps" else _REPLICATED


# ---- training ----


class SharedModel(tfdistill.MultiWorkerTraining, keras.Model):
    """A model that workers train together, without teachers."""


class _WithVersion(keras.callbacks.Callback):
    """Puts one version of a peer in place before the first step."""

    def __init__(self, wanted: Mapping[int, int]) -> None:
        super().__init__()
        self._wanted = dict(wanted)

    def on_train_begin(self, logs: Any = None) -> None:
        found = self.model.teachers.load_versions(self._wanted)
        if found != self._wanted:
            raise RuntimeError(
                f"The teacher's version {self._wanted} must be in place; "
                f"received {found}."
            )


def _teachers(
    case: Case, exchange: tfdistill.Exchange
) -> tfdistill.TeacherSet | None:
    if case.fixed:
        paths = [exchange.version_path(_CLASSIFIER, s) for s in _STEPS]
        return tfdistill.TeacherSet(saved_models=paths, weights=[1.0, 2.0])
    if case.peer is not None:
        return tfdistill.TeacherSet(exchange, [case.peer])
    return None


def _model(case: Case, exchange: tfdistill.Exchange) -> keras.Model:
    compiled = dict(case.compiled)
    if not case.is_wrapped:
        model = case.student(SharedModel)
    else:
        model = tfdistill.CodistillModel(
            case.student(keras.Model), teachers=_teachers(case, exchange)
        )
        if case.distillation_loss is not None:
            compiled["distillation_loss"] = case.distillation_loss()
            compiled["distillation_weight"] = tfdistill.schedules.BurnIn(
                steps=2, weight=0.7
            )
    model.compile(case.optimizer(), case.loss(), jit_compile=False, **compiled)
    return model


def _callbacks(
    place: str, case: Case, exchange: tfdistill.Exchange
) -> list[keras.callbacks.Callback]:
    if place == TEACHERS:
        group = _CLASSIFIER if case.student is _classifier else _CLICKS
        return [
            tfdistill.StudentExporter(
                exchange, every_steps=_STEPS[0], group=group
            ),
            _Published(exchange, group),
        ]
    if case.peer is not None:
        return [_WithVersion({case.peer: _STEPS[-1]})]
    return []


class _Published(keras.callbacks.Callback):
    """Waits for each version, so that the next one is not left out."""

    def __init__(self, exchange: tfdistill.Exchange, group: int) -> None:
        super().__init__()
        self._exchange, self._group = exchange, group

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        step = int(self.model.optimizer.iterations.numpy())
        if step % _STEPS[0] == 0:
            self._exchange.wait(
                self._group,
                newer_than=step - 1,
                timeout_secs=60.0,
                poll_secs=0.05,
            )


def train(
    place: str, case: Case, strategy: Any, exchange: tfdistill.Exchange
) -> Found:
    """Trains one case.

    Args:
        place: Where.
        case: What.
        strategy: Of the place.
        exchange: Of the teachers.

    Returns:
        The digest of the weights, and the last epoch's losses.
    """
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = _model(case, exchange)
    data = tf.data.Dataset.from_tensor_slices(case.data()).batch(_BATCH_SIZE)
    history = model.fit(
        data,
        epochs=_EPOCHS,
        validation_data=data,
        callbacks=_callbacks(place, case, exchange),
        shuffle=False,
        verbose=0,
        **case.fit,
    )
    trained = getattr(model, "student", model)
    weights = list(map(np.asarray, trained.get_weights()))
    names = ("loss", "distillation_loss", "val_loss")
    logs = {k: float(v[-1]) for k, v in history.history.items() if k in names}
    return {"weights": digest(weights), **logs}


def use_all_devices(number: int) -> None:
    """Gives a worker of several a replica on each of its CPU devices.

    TensorFlow does so for GPUs; of CPUs it takes the first only.
    """
    from tensorflow.python.distribute import collective_all_reduce_strategy

    def devices(self: Any, resolver: Any, worker: str) -> tuple[Any, str]:
        found = tuple(f"{worker}/device:CPU:{i}" for i in range(number))
        return found, "CPU"

    extended = collective_all_reduce_strategy.CollectiveAllReduceExtended
    extended._initialize_local_devices = devices


def _define() -> None:
    for name, text in (
        ("cases", "names, with commas"),
        ("exchange", "of the teachers"),
        ("output", "directory"),
    ):
        flags.DEFINE_string(name, None, text, required=True)
    flags.DEFINE_enum("place", None, list(DEVICES), "where", required=True)


def main(argv: Sequence[str]) -> None:
    """Runs the cases of one place as one task."""
    del argv  # Only the program's name is left of it.
    options = flags.FLAGS
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * DEVICES[options.place],
    )
    cluster = tfdistill.Cluster.from_env()
    if options.place == "two_workers":
        use_all_devices(DEVICES[options.place])
    strategy = tfdistill.make_strategy(cluster)
    expected = DEVICES[options.place] * cluster.num_workers
    if strategy.num_replicas_in_sync != expected:
        raise RuntimeError(
            f"{options.place} must have {expected} replicas; received "
            f"{strategy.num_replicas_in_sync}."
        )
    exchange = tfdistill.Exchange(options.exchange, key=None)
    found = {}
    for name, case in cases_of(options.place).items():
        if name in options.cases.split(","):
            print("case", name, flush=True)
            found[name] = train(options.place, case, strategy, exchange)
    path = pathlib.Path(options.output, f"task_{cluster.task_index}.json")
    path.write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    _define()
    app.run(main)
