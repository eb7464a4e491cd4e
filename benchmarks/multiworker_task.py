"""One worker of the multi-worker benchmark, and what it takes turns at."""

import dataclasses
import json
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks import measure
from tfdistill.system import programs

# What trains in a turn, and the group of processes that does it.
GROUP_OF_SIDE = {"tfdistill": 0, "codistill_model": 0, "tf_keras": 1}
MODELS = ("mlp", "cnn")
BATCHES = ("static", "dynamic")
_TURN_TIMEOUT_SECS = 300.0
_POLL_SECS = 0.005
RESULT = "result_{}.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What is compared: one model, one way to feed and to step it."""

    model: str
    steps_per_execution: int
    batch: str

    @property
    def name(self) -> str:
        """A name such as `"cnn_static_x10"`."""
        return f"{self.model}_{self.batch}_x{self.steps_per_execution}"


def settings(options: programs.Options) -> list[Setting]:
    """Returns all that the command line asks for."""
    return [
        Setting(model=model, batch=batch, steps_per_execution=count)
        for model in options.models
        for batch in options.batches
        for count in options.steps_per_execution
    ]


def turns(
    options: programs.Options,
) -> Iterator[tuple[Setting, int, str]]:
    """Yields setting, round and side, alike in every process.

    Every second round the sides change their order.
    """
    for setting in settings(options):
        for number in range(options.rounds):
            sides = list(GROUP_OF_SIDE)
            for side in sides if number % 2 else sides[::-1]:
                yield setting, number, side


def build(keras_like: Any, name: str) -> Any:
    """Builds the same layers with either Keras.

    Args:
        keras_like: The module `keras` or `tf_keras`.
        name: One of `MODELS`.

    Returns:
        A functional model that gives ten logits.
    """
    layers = keras_like.layers
    inputs = keras_like.Input(_input_shape(name))
    hidden = inputs
    if name == "cnn":
        for filters in (16, 32, 64):
            hidden = layers.Conv2D(
                filters, 3, padding="same", activation="relu"
            )(hidden)
            hidden = layers.MaxPooling2D()(hidden)
        hidden = layers.GlobalAveragePooling2D()(hidden)
    else:
        for width in (256, 128):
            hidden = layers.Dense(width, activation="relu")(hidden)
    return keras_like.Model(inputs, layers.Dense(10)(hidden))


def _input_shape(name: str) -> tuple[int, ...]:
    return {"cnn": (32, 32, 3), "mlp": (784,)}[name]


def _compiled(side: str, setting: Setting) -> Any:
    """Makes one side's model; call it in the strategy's scope."""
    if side == "tf_keras":
        import tf_keras as keras_like
    else:
        import keras as keras_like
    model = build(keras_like, setting.model)
    rng = np.random.default_rng(0)
    model.set_weights(
        [
            rng.normal(scale=0.05, size=w.shape).astype("float32")
            for w in model.get_weights()
        ]
    )
    if side != "tf_keras":
        model = _ours(side, model)
    model.compile(
        keras_like.optimizers.Adam(1e-3),
        keras_like.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=setting.steps_per_execution,
        jit_compile=False,
    )
    return model


def _ours(side: str, model: Any) -> Any:
    import tfdistill

    if side == "codistill_model":
        return tfdistill.CodistillModel(model)

    return tfdistill.DistributedModel(model)


def _data(setting: Setting, batch_size: int) -> Any:
    import tensorflow as tf

    rng = np.random.default_rng(1)
    num_examples = 8 * batch_size
    shape = (num_examples, *_input_shape(setting.model))
    x = rng.normal(size=shape).astype("float32")
    y = rng.integers(0, 10, size=num_examples)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA
    )
    data = tf.data.Dataset.from_tensor_slices((x, y)).repeat()
    data = data.batch(batch_size, drop_remainder=setting.batch == "static")
    return data.prefetch(tf.data.AUTOTUNE).with_options(options)


class Worker:
    """One process of one cluster: trains when it is its side's turn."""

    def __init__(self, options: programs.Options) -> None:
        """Makes the strategy, which waits for the other worker.

        Args:
            options: The parsed options of `benchmarks.multiworker`.
        """
        import tfdistill
        from tfdistill.cluster import identity

        self._options = options
        self._cluster = identity.Cluster.from_env()
        self._strategy = tfdistill.make_strategy(self._cluster)
        self._workdir = pathlib.Path(self._cluster.workdir or ".")
        self.results: dict[str, dict[str, Any]] = {}

    def work(self) -> None:
        """Takes every turn of this group's sides."""
        for index, (setting, number, side) in enumerate(turns(self._options)):
            if GROUP_OF_SIDE[side] != self._cluster.group:
                continue
            if index:
                _wait_for(self._turn_path(index - 1))
            rate, loss = self._train(side, setting)
            found = self.results.setdefault(setting.name, {}).setdefault(
                side, {"steps_per_second": []}
            )
            found["steps_per_second"].append(rate)
            found["loss"] = loss
            if self._cluster.is_chief:
                measure.log(f"{setting.name} {number} {side}: {rate:.2f}/s")
                self._turn_path(index).touch()
        if self._cluster.is_chief:
            path = self._workdir / RESULT.format(self._cluster.group)
            path.write_text(json.dumps(self.results), "utf-8")

    def _turn_path(self, index: int) -> pathlib.Path:
        return self._workdir / f"turn_{index}"

    def _train(self, side: str, setting: Setting) -> tuple[float, float]:
        """Runs one `fit`; returns steps per second and the loss."""
        with self._strategy.scope():
            model = _compiled(side, setting)
        clock = _clock(side)
        history = model.fit(
            _data(setting, self._options.batch_size),
            steps_per_epoch=self._options.steps,
            verbose=0,
            callbacks=[clock],
        )
        # Left out: the first execution, which traces and starts the input
        # pipeline, and the second, which is the first to find caches filled.
        first, last = clock.ends[min(1, len(clock.ends) - 2)], clock.ends[-1]
        rate = (last[0] - first[0]) / (last[1] - first[1])
        return rate, round(float(history.history["loss"][-1]), 6)


def _clock(side: str) -> Any:
    """A callback that notes when each execution ended."""
    if side == "tf_keras":
        import tf_keras as keras_like
    else:
        import keras as keras_like

    class Clock(keras_like.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.ends: list[tuple[int, float]] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.ends.append((batch, time.perf_counter()))

    return Clock()


def _wait_for(path: pathlib.Path) -> None:
    deadline = time.monotonic() + _TURN_TIMEOUT_SECS
    while not path.exists():
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"The other cluster did not finish its turn ({path.name}) "
                f"within {_TURN_TIMEOUT_SECS:g} s; see its logs."
            )
        time.sleep(_POLL_SECS)
