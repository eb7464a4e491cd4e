"""What the parameter-server benchmark trains: one click model, many ways."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tfdistill.system import programs

NUM_FIELDS = 26
NUM_NUMBERS = 13
LEARNING_RATE = 0.001
_NUM_BATCHES = 64
_ZIPF_EXPONENT = 1.3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One model and its data.

    Attributes:
        rows_per_field: Ids of each of the 26 fields.
        dim: Length of a row.
        hidden: Widths of the hidden layers.
        batch_size: Examples a step.
        num_workers: Workers, and as many parameter servers.
    """

    rows_per_field: int = 10_000
    dim: int = 16
    hidden: tuple[int, ...] = (256, 128, 64)
    batch_size: int = 1024
    num_workers: int = 2

    @property
    def num_rows(self) -> int:
        """Rows of the whole table."""
        return NUM_FIELDS * self.rows_per_field


SETTINGS = {
    "mlp": Setting(),
    "wide": Setting(dim=64, hidden=(32, 16)),
}


def arrays(setting: Setting) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Makes numbers, ids and clicks; ids of a field follow a Zipf law.

    Args:
        setting: What to make them for.

    Returns:
        float32 `[n, 13]`; int64 `[n, 26]`, each field counting from 0;
        float32 `[n, 1]`.
    """
    rng = np.random.default_rng(0)
    count = _NUM_BATCHES * setting.batch_size
    ids = (rng.zipf(_ZIPF_EXPONENT, (count, NUM_FIELDS)) - 1) % (
        setting.rows_per_field
    )
    numbers = rng.normal(size=(count, NUM_NUMBERS)).astype("float32")
    clicks = (rng.random((count, 1)) < 0.25).astype("float32")
    return numbers, ids.astype("int64"), clicks


def field_offsets(setting: Setting) -> np.ndarray:
    """First row of each field in one table for all, int64 `[26]`."""
    return np.arange(NUM_FIELDS) * setting.rows_per_field


def data_function(setting: Setting) -> Callable[..., Any]:
    """Returns a data set function: all batches in memory, again and again."""
    import tensorflow as tf

    numbers, ids, clicks = arrays(setting)

    def dataset(context: Any = None) -> Any:
        del context  # Every worker reads the same batches.
        features = {"x": numbers, "ids": ids}
        data = tf.data.Dataset.from_tensor_slices((features, clicks))
        data = data.batch(setting.batch_size, drop_remainder=True)
        return data.cache().repeat().prefetch(4)

    return dataset


def click_model(keras_like: Any, setting: Setting, embed: Any) -> Any:
    """Builds the layers with either Keras.

    Args:
        keras_like: The module `keras` or `tf_keras`.
        setting: The sizes.
        embed: Layer or function from ids `[batch, 26]` to
            `[batch, 26, dim]`.

    Returns:
        A functional model of `{"x": ..., "ids": ...}` that gives a logit.
    """
    layers = keras_like.layers
    x = keras_like.Input((NUM_NUMBERS,), name="x")
    ids = keras_like.Input((NUM_FIELDS,), dtype="int64", name="ids")
    rows = layers.Flatten()(embed(ids))
    hidden = layers.Concatenate()([x, rows])
    for width in setting.hidden:
        hidden = layers.Dense(width, activation="relu")(hidden)
    return keras_like.Model({"x": x, "ids": ids}, layers.Dense(1)(hidden))


def our_model(setting: Setting, *, steps_per_execution: Any) -> Any:
    """Makes a compiled `CodistillModel`; call it in the strategy's scope.

    Args:
        setting: The sizes.
        steps_per_execution: Steps a call.
    """
    import keras

    import tfdistill

    sizes = [setting.rows_per_field] * NUM_FIELDS
    table = tfdistill.layers.ShardedEmbedding(sizes, setting.dim)
    model = tfdistill.CodistillModel(click_model(keras, setting, table))
    model.compile(
        keras.optimizers.Adagrad(LEARNING_RATE),
        keras.losses.BinaryCrossentropy(from_logits=True),
        steps_per_execution=steps_per_execution,
        jit_compile=False,
    )
    return model


def tf_keras_model(
    setting: Setting, *, optimizer: str, steps_per_execution: int
) -> Any:
    """Makes the same with tf_keras; call it in the strategy's scope.

    Args:
        setting: The sizes.
        optimizer: `"new"` or `"legacy"`, which Adagrad.
        steps_per_execution: Steps a call.
    """
    import tf_keras

    optimizers = tf_keras.optimizers
    adagrad = {"new": optimizers.Adagrad, "legacy": optimizers.legacy.Adagrad}
    # One table is faster than one a field.
    table = tf_keras.layers.Embedding(setting.num_rows, setting.dim)
    offsets = field_offsets(setting)
    model = click_model(tf_keras, setting, lambda ids: table(ids + offsets))
    model.compile(
        adagrad[optimizer](LEARNING_RATE),
        tf_keras.losses.BinaryCrossentropy(from_logits=True),
        steps_per_execution=steps_per_execution,
        jit_compile=False,
    )
    return model


def fit(
    keras_like: Any,
    model: Any,
    data: Any,
    options: programs.Options,
    *,
    batch_size: int,
) -> list[float]:
    """Runs `fit` and measures all epochs but the first.

    Args:
        keras_like: The module `keras` or `tf_keras`.
        model: A compiled model.
        data: What its `fit` takes.
        options: Of the command line: how many steps and epochs.
        batch_size: Examples a step.

    Returns:
        The examples per second of each epoch, from the time between its start
        and its end, when all scheduled steps are done.
    """

    class Clock(keras_like.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.secs: list[float] = []

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.start = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.secs.append(time.perf_counter() - self.start)

    clock = Clock()
    model.fit(
        data,
        epochs=1 + options.epochs,
        steps_per_epoch=options.steps,
        verbose=0,
        callbacks=[clock],
    )
    examples = options.steps * batch_size
    return [examples / secs for secs in clock.secs[1:]]
