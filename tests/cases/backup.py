"""Trainings that are stopped at some step and gone on with, or are not."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdistill
from tests.cases import waits
from tfdistill import data

NUM_EXAMPLES, BATCH, SEED = 22, 4, 5
Results = dict[str, np.ndarray]


class Stopped(BaseException):
    """A training was stopped on purpose, as a crash would."""


class _EachExecution(keras.callbacks.Callback):
    """Acts where executions end, however long they are."""

    def next_due(self, step: int) -> None:
        del step


class StopAt(_EachExecution):
    def __init__(self, after: int) -> None:
        super().__init__()
        self._left = after

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._left -= 1
        if self._left <= 0:
            raise Stopped


class AtStep(keras.callbacks.Callback):
    def __init__(self, step: int, function: Callable[[Any], None]) -> None:
        super().__init__()
        self._step, self._function = step, function

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if int(self.model.optimizer.iterations.numpy()) == self._step:
            self._function(self.model)


class Patient(_EachExecution):
    """Waits for the backup in progress, so that none is left out."""

    def __init__(self, backup: Any) -> None:
        super().__init__()
        self._backup = backup

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        writer = self._backup.begun._worker
        assert writer is None or writer.wait_idle(60.0)


class Logs(_EachExecution):
    """Keeps the logs of each step and epoch, by step; NaN equals NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, dict[str, str]] = {}

    def _note(self, kind: str, logs: Any) -> None:
        step = int(self.model.optimizer.iterations.numpy())
        self.found[f"{kind}_{step}"] = {
            key: repr(float(value)) for key, value in logs.items()
        }

    def batches(self) -> list[dict[str, str]]:
        return [v for k, v in self.found.items() if k.startswith("batch")]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._note(f"batch_{batch}", logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._note(f"epoch_{epoch}", logs)


def numbered(num_examples: int = NUM_EXAMPLES) -> tf.data.Dataset:
    """Examples whose first feature is their number."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(num_examples, 4)).astype("float32")
    y = np.abs(x[:, 0] * 3).astype("int64") % 3
    x[:, 0] = np.arange(num_examples) / num_examples
    return tf.data.Dataset.from_tensor_slices((x, y))


def finite() -> tf.data.Dataset:
    """Another order in each epoch, and a last batch that is smaller."""
    return numbered().shuffle(NUM_EXAMPLES).batch(BATCH)


def endless() -> tf.data.Dataset:
    return numbered().shuffle(10).repeat().batch(BATCH).prefetch(2)


def unknown() -> tf.data.Dataset:
    """Ends, but does not say when."""
    return numbered().shuffle(10).filter(lambda *_: True).batch(BATCH)


def resumable(begun: list[int]) -> tf.data.Dataset:
    """Endless; notes from what batches on it was made."""
    x, y = numbered().batch(NUM_EXAMPLES).get_single_element()

    def batches(first: int) -> tf.data.Dataset:
        begun.append(first)
        rows = data.shuffled_indices(NUM_EXAMPLES, seed=1, first=first * BATCH)
        return rows.batch(BATCH).map(
            lambda i: (tf.gather(x, i), tf.gather(y, i))
        )

    return data.resumable(batches)


class Seen(keras.layers.Layer):
    """Counts how often a training has seen each example, by its number."""

    def build(self, shape: Any) -> None:
        self.counts = self.add_weight(
            shape=(NUM_EXAMPLES,),
            dtype="int32",
            initializer="zeros",
            trainable=False,
        )

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            number = tf.cast(tf.round(inputs[:, 0] * NUM_EXAMPLES), tf.int32)
            seen = tf.reduce_sum(tf.one_hot(number, NUM_EXAMPLES), axis=0)
            self.counts.assign_add(tf.cast(seen, tf.int32))
        return inputs


def times_seen(model: Any, strategy: Any = None) -> set[int]:
    """How often the examples were seen, by all of this task's replicas."""
    strategy = strategy or tf.distribute.get_strategy()
    counts = model.student.layers[0].counts.value
    copies = strategy.experimental_local_results(counts)
    return set(np.sum([np.asarray(copy) for copy in copies], axis=0).tolist())


def wait_for_backup(directory: Any, step: int) -> None:
    path = pathlib.Path(directory, "group_0", str(step), "manifest.json")
    waits.until(path.exists, str(path))


def student(num_classes: int = 3) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((4,)),
            Seen(),
            keras.layers.Dense(6, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(num_classes),
        ]
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    data: Callable[[], Any] = endless
    fit: dict = dataclasses.field(
        default_factory=lambda: {"steps_per_epoch": 5}
    )
    epochs: int = 3
    validates: bool = False
    steps_per_execution: Any = 1
    optimizer: Callable[[], Any] = lambda: keras.optimizers.Adam(0.05)
    callbacks: Callable[[], list] = list
    num_classes: int = 3
    weight: Any = 1.0
    seed: int = SEED


# Here, where a change of it is seen by `references`.
REPLICAS = Case(data=finite, fit={}, epochs=2)


def build(case: Case, strategy: Any = None, teachers: Any = None) -> Any:
    keras.utils.set_random_seed(case.seed)
    strategy = strategy or tf.distribute.get_strategy()
    with strategy.scope():
        model = tfdistill.CodistillModel(
            student(case.num_classes), teachers=teachers
        )
        model.compile(
            case.optimizer(),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=case.steps_per_execution,
            distillation_loss=tfdistill.losses.SoftTargetCrossEntropy(),
            distillation_weight=case.weight,
        )
    return model


def train(
    case: Case,
    directory: Any = None,
    *,
    strategy: Any = None,
    teachers: Any = None,
    stop_after: int | None = None,
    every_steps: int | None = 3,
    callbacks: Any = (),
    warm_start: Any = None,
) -> tuple[Any, Logs, Any]:
    model = build(case, strategy, teachers)
    logs = Logs()
    backup = tfdistill.callbacks.Backup(
        directory or "unused", every_steps=every_steps, warm_start=warm_start
    )
    x = case.data()
    x = {"x": x} if isinstance(x, tf.data.Dataset) else x
    try:
        model.fit(
            **x,
            **case.fit,
            epochs=case.epochs,
            verbose=0,
            validation_data=numbered(8).batch(4) if case.validates else None,
            callbacks=[
                *case.callbacks(),
                *callbacks,
                logs,
                *([Patient(backup), backup] if directory else []),
                *([StopAt(stop_after)] if stop_after else []),
            ],
        )
    except Stopped:
        pass
    return model, logs, backup


def values(model: Any, strategy: Any = None) -> Results:
    """All that training leaves behind, each replica's own."""
    strategy = strategy or tf.distribute.get_strategy()
    return {
        f"{kind}_{index}_{replica}": np.asarray(copy)
        for kind, variables in (
            ("model", model.variables),
            ("optimizer", model.optimizer.variables),
        )
        for index, variable in enumerate(variables)
        for replica, copy in enumerate(
            strategy.experimental_local_results(variable.value)
        )
    }


def assert_same(actual: Results, expected: Results, **kwargs: Any) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        if kwargs:
            np.testing.assert_allclose(
                actual[key], value, err_msg=key, **kwargs
            )
        else:
            np.testing.assert_array_equal(actual[key], value, err_msg=key)
