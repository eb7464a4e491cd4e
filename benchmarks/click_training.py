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
        rows_per_field: Ids of each of the 26 fields that occur in the data.
        dim: Length of a row.
        hidden: Widths of the hidden layers.
        batch_size: Examples a step.
        num_workers: Workers, and as many parameter servers.
        spread: The table has as many times as many rows; those that occur in
            the data lie this far apart.
    """

    rows_per_field: int = 10_000
    dim: int = 16
    hidden: tuple[int, ...] = (256, 128, 64)
    batch_size: int = 1024
    num_workers: int = 2
    spread: int = 1

    @property
    def rows_of_field(self) -> int:
        """Rows of the table that are a field's."""
        return self.rows_per_field * self.spread

    @property
    def num_rows(self) -> int:
        """Rows of the whole table."""
        return NUM_FIELDS * self.rows_of_field


SETTINGS = {
    "mlp": Setting(),
    "wide": Setting(dim=64, hidden=(32, 16)),
    # Steps that are short beside the way to the servers.
    "short": Setting(batch_size=256, num_workers=1),
    # The same rows in tables of 1e5 rows and of 1e8.
    **{
        f"rows_{spread}": Setting(
            rows_per_field=3_846, dim=4, hidden=(32, 16), spread=spread
        )
        for spread in (1, 1_000)
    },
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
    return numbers, ids.astype("int64") * setting.spread, clicks


def field_offsets(setting: Setting) -> np.ndarray:
    """First row of each field in one table for all, int64 `[26]`."""
    return np.arange(NUM_FIELDS) * setting.rows_of_field


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


# Kinds of tables besides one of all fields, whose ids are hashed.
BY_ID, FEATURES, APART = "by_id", "features", "apart"


def our_model(
    setting: Setting,
    *,
    steps_per_execution: Any,
    kind: str = "",
    rows_ahead: int = 0,
) -> Any:
    """Makes a compiled `CodistillModel`; call it in the strategy's scope.

    Args:
        setting: The sizes.
        steps_per_execution: Steps a call.
        kind: Of tables: `BY_ID`, ids get rows as they come, in as large a
            table; `FEATURES`, one of each field by `FeatureEmbedding`, or
            `APART`, looked up by itself. Default: one table.
        rows_ahead: As `compile` takes it.
    """
    import keras

    import tfdistill

    table = _tables(tfdistill.layers, setting)[kind]()
    model = tfdistill.CodistillModel(click_model(keras, setting, table))
    model.compile(
        keras.optimizers.Adagrad(LEARNING_RATE),
        keras.losses.BinaryCrossentropy(from_logits=True),
        steps_per_execution=steps_per_execution,
        rows_ahead=rows_ahead,
        jit_compile=False,
    )
    return model


def _tables(layers: Any, setting: Setting) -> dict[str, Callable[[], Any]]:
    """Returns by kind what makes a layer of `[batch, 26]` ids."""
    sizes = [setting.rows_of_field] * NUM_FIELDS

    def features() -> Any:
        import keras_rs

        shapes = (setting.batch_size,), (setting.batch_size, setting.dim)
        embed = layers.FeatureEmbedding(
            [
                keras_rs.layers.FeatureConfig(
                    f"field_{field}",
                    keras_rs.layers.TableConfig(
                        f"table_{field}", size, setting.dim
                    ),
                    *shapes,
                )
                for field, size in enumerate(sizes)
            ]
        )
        return lambda ids: _stacked(embed(_fields(ids)))

    def apart() -> Any:
        tables = [layers.ShardedEmbedding(n, setting.dim) for n in sizes]
        return lambda ids: _stacked(
            [
                table(own)
                for table, own in zip(tables, _fields(ids), strict=True)
            ]
        )

    return {
        "": lambda: layers.ShardedEmbedding(sizes, setting.dim),
        BY_ID: lambda: layers.DynamicEmbedding(
            setting.num_rows, setting.dim, num_fields=NUM_FIELDS
        ),
        FEATURES: features,
        APART: apart,
    }


def _fields(ids: Any) -> list[Any]:
    return [ids[:, field] for field in range(NUM_FIELDS)]


def _stacked(vectors: Any) -> Any:
    import keras

    return keras.ops.stack(vectors, axis=1)


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
    num_bytes: Callable[[], int] | None = None,
) -> dict[str, Any]:
    """Runs `fit` and measures all epochs but the first.

    Args:
        keras_like: The module `keras` or `tf_keras`.
        model: A compiled model.
        data: What its `fit` takes.
        options: Of the command line: how many steps and epochs.
        batch_size: Examples a step.
        num_bytes: Tells how many bytes travelled so far.

    Returns:
        `rates`: the examples per second of each epoch, from the time between
        its start and its end, when all scheduled steps are done.
        `first_step_secs`: until the first execution had ended, of ours. And
        `bytes_per_step`: of each epoch, if they are counted.
    """
    began = time.perf_counter()

    class Clock(keras_like.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.secs: list[float] = []
            self.bytes: list[int] = []

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.bytes_before = num_bytes() if num_bytes else 0
            self.start = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.secs.append(time.perf_counter() - self.start)
            if num_bytes:
                self.bytes.append(num_bytes() - self.bytes_before)

    class FirstStep(keras_like.callbacks.Callback):
        secs: float | None = None

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if self.secs is None:
                self.secs = time.perf_counter() - began

    clock, first = Clock(), FirstStep()
    # tf_keras refuses hooks of batches on parameter servers.
    is_ours = keras_like.__name__ == "keras"
    model.fit(
        data,
        epochs=1 + options.epochs,
        steps_per_epoch=options.steps,
        verbose=0,
        callbacks=[clock, first] if is_ours else [clock],
    )
    examples = options.steps * batch_size
    return {
        "rates": [examples / secs for secs in clock.secs[1:]],
        "first_step_secs": first.secs,
        "bytes_per_step": [n / options.steps for n in clock.bytes[1:]],
    }
