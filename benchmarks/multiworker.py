"""Steps per second of `fit` on two workers: ours on Keras 3 beside tf_keras.

Usage: python -m benchmarks.multiworker [--rounds=7]

Two clusters of real processes run at the same time: one trains with
tfdistill, one with tf_keras, the line of Keras that TensorFlow supports under
MultiWorkerMirroredStrategy. They take turns by files, so that only one of
them works at any moment. Both start from the same weights, read the same
data, and compute the same metrics. Every turn builds and traces its model anew,
because equal graphs of one model were seen to run at rates 1.5 times apart.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import measure

_NUM_WORKERS = 2
# What trains in a turn, and the group of processes that does it.
_GROUP_OF_SIDE = {"tfdistill": 0, "codistill_model": 0, "tf_keras": 1}
_MODELS = ("mlp", "cnn", "tiny")
_BATCHES = ("static", "dynamic")
_TURN_TIMEOUT_SECS = 300.0
_POLL_SECS = 0.005
_RESULT = "result_{}.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Setting:
    """What is compared: one model, one way to feed and to step it."""

    model: str
    steps_per_execution: int
    batch: str

    @property
    def name(self) -> str:
        return f"{self.model}_{self.batch}_x{self.steps_per_execution}"


def _settings(options: argparse.Namespace) -> list[_Setting]:
    return [
        _Setting(model=model, batch=batch, steps_per_execution=count)
        for model in options.models
        for batch in options.batches
        for count in options.steps_per_execution
    ]


def _turns(
    options: argparse.Namespace,
) -> Iterator[tuple[_Setting, int, str]]:
    """Yields setting, round and side, alike in every process.

    Every second round the sides change their order.
    """
    for setting in _settings(options):
        for number in range(options.rounds):
            sides = list(_GROUP_OF_SIDE)
            for side in sides if number % 2 else sides[::-1]:
                yield setting, number, side


# ---- the launching process ----


def _launch(argv: Sequence[str], workdir: str, timeout_secs: float) -> None:
    from tfdistill import local_cluster
    from tfdistill import local_run

    root = str(pathlib.Path(__file__).resolve().parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([root, inherited] if inherited else [root])
    topology = local_cluster.LocalCluster(
        command=[sys.executable, "-m", "benchmarks.multiworker", "--task"]
        + list(argv),
        workdir=workdir,
        num_groups=len(set(_GROUP_OF_SIDE.values())),
        workers_per_group=_NUM_WORKERS,
        env={"PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "2"},
    )
    with local_run.LocalRun(topology) as running:
        result = running.wait(timeout_secs=timeout_secs)
    for group in result.groups:
        if group.state != "done":
            lines = "\n".join(group.last_lines)
            raise RuntimeError(
                f"Group {group.group} must end well; it {group.state}: "
                f"{group.reason}. Its last lines:\n{lines}"
            )


def _read_results(workdir: str) -> dict[str, dict[str, Any]]:
    """Returns what the chiefs measured: by setting, then by side."""
    merged: dict[str, dict[str, Any]] = {}
    for group in set(_GROUP_OF_SIDE.values()):
        text = pathlib.Path(workdir, _RESULT.format(group)).read_text("utf-8")
        for name, sides in json.loads(text).items():
            merged.setdefault(name, {}).update(sides)
    return merged


def _compare(sides: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    rates = {side: found["steps_per_second"] for side, found in sides.items()}
    ours, wrapped = (
        measure.ratio_of(rates[side], rates["tf_keras"], best=max)
        for side in ("tfdistill", "codistill_model")
    )
    return {
        **measure.judge(ours["of_medians"], at_least=1.0),
        "ratios": ours,
        "codistill_model_ratios": wrapped,
        "steps_per_second": {
            side: measure.summary(values) for side, values in rates.items()
        },
        "final_loss": {side: found["loss"] for side, found in sides.items()},
        "bound": model,
    }


def run(
    argv: Sequence[str], options: argparse.Namespace, record: dict[str, Any]
) -> None:
    """Runs both clusters and fills the record.

    Args:
        argv: The arguments that the options were parsed from.
        options: The parsed options of `main`.
        record: What will be printed.
    """
    with tempfile.TemporaryDirectory(prefix="tfdistill-bench-") as workdir:
        _launch(argv, workdir, options.timeout_secs)
        results = _read_results(workdir)
    bounds = {name: _bound(name, options.batch_size) for name in options.models}
    settings = {
        setting.name: _compare(results[setting.name], bounds[setting.model])
        for setting in _settings(options)
    }
    worst = min(settings.values(), key=lambda found: found["ratio"])
    record.update(
        benchmark="multiworker",
        config={k: v for k, v in vars(options).items() if k != "task"},
        ratio=worst["ratio"],
        target=worst["target"],
        met=all(found["met"] for found in settings.values()),
        settings=settings,
        machine=measure.machine(),
    )


def _bound(name: str, batch_size: int) -> dict[str, Any]:
    """What each step must at least compute and send."""
    import keras

    model = _build(keras, name)
    flops = measure.forward_flops(model, batch_size)
    return {
        "gradient_bytes_per_step": 4 * model.count_params(),
        # A backward pass is about two forward passes.
        "gigaflops_per_step": round(3 * flops / 1e9, 5),
    }


# ---- one worker ----


def _build(keras_like: Any, name: str) -> Any:
    """Builds the same layers with Keras 3 or with tf_keras."""
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
        for width in (256, 128) if name == "mlp" else (4,):
            hidden = layers.Dense(width, activation="relu")(hidden)
    return keras_like.Model(inputs, layers.Dense(10)(hidden))


def _input_shape(name: str) -> tuple[int, ...]:
    return {"cnn": (32, 32, 3), "mlp": (784,), "tiny": (5,)}[name]


def _compiled(side: str, setting: _Setting) -> Any:
    """Makes one side's model; call it in the strategy's scope."""
    if side == "tf_keras":
        import tf_keras as keras_like
    else:
        import keras as keras_like
    model = _build(keras_like, setting.model)
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
    import keras

    import tfdistill

    if side == "codistill_model":
        return tfdistill.CodistillModel(model)

    class Model(tfdistill.MultiWorkerTraining, keras.Model):
        pass

    return Model(model.inputs, model.outputs)


def _data(setting: _Setting, batch_size: int) -> Any:
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


class _Worker:
    """One process of one cluster: trains when it is its side's turn."""

    def __init__(self, options: argparse.Namespace) -> None:
        import tfdistill
        from tfdistill import cluster

        self._options = options
        self._cluster = cluster.Cluster.from_env()
        self._strategy = tfdistill.make_strategy(self._cluster)
        self._workdir = pathlib.Path(self._cluster.workdir or ".")
        self.results: dict[str, dict[str, Any]] = {}

    def work(self) -> None:
        """Takes every turn of this group's sides."""
        for index, (setting, number, side) in enumerate(_turns(self._options)):
            if _GROUP_OF_SIDE[side] != self._cluster.group:
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
            path = self._workdir / _RESULT.format(self._cluster.group)
            path.write_text(json.dumps(self.results), "utf-8")

    def _turn_path(self, index: int) -> pathlib.Path:
        return self._workdir / f"turn_{index}"

    def _train(self, side: str, setting: _Setting) -> tuple[float, float]:
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


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--models", nargs="+", choices=_MODELS, default=["mlp", "cnn"])
    add("--batches", nargs="+", choices=_BATCHES, default=list(_BATCHES))
    add("--steps_per_execution", nargs="+", type=int, default=[1, 10])
    add("--batch_size", type=int, default=128, help="of both workers together")
    add("--steps", type=int, default=80, help="steps a turn")
    add("--rounds", type=int, default=7)
    add("--timeout_secs", type=float, default=3000.0, help="of the whole run")
    add("--task", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.steps < 2 * max(options.steps_per_execution):
        parser.error(
            "--steps must be at least twice --steps_per_execution; received "
            f"{options.steps} and {max(options.steps_per_execution)}"
        )
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark and prints one line of JSON.

    Args:
        argv: Arguments without the program's name. Default `sys.argv[1:]`.

    Returns:
        The exit code.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    arguments = sys.argv[1:] if argv is None else list(argv)
    options = _parse(arguments)
    if options.task:
        _Worker(options).work()
        return 0
    with measure.one_json_line() as record:
        run(arguments, options, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
