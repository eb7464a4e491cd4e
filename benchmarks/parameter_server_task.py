"""One task of the parameter-server benchmark: one side in a fresh cluster.

Workers and parameter servers serve; what follows runs on the chief, or in the
only process where there is no cluster.
"""

import dataclasses
import json
import os
import pathlib
import re
import time
from typing import Any

from benchmarks import click_training
from tfdistill.system import programs

RESULT = "result.json"
# The side that runs without workers and parameter servers.
_ALONE = "one_process"
TF_KERAS = tuple(
    f"tf_keras_{optimizer}_{partitioner}"
    for optimizer in ("new", "legacy")
    for partitioner in ("whole", "halves", "min_size")
)
_OURS = "tfdistill"
NAMES = (_OURS, "keras", _ALONE, *TF_KERAS)
_MIN_SHARD_BYTES = 256 * 1024
_SIDE = re.compile(r"^(?P<name>.+?)(_x(?P<steps>\d+|auto))?$")


@dataclasses.dataclass(frozen=True)
class Side:
    """Who trains.

    Attributes:
        name: Such as `"tfdistill"` or `"tf_keras_legacy_halves"`.
        steps_per_execution: Steps a call; "auto" with tfdistill only.
    """

    name: str
    steps_per_execution: Any

    @classmethod
    def of(cls, text: str) -> "Side":
        """Reads a side such as `"tfdistill_x10"`."""
        found = _SIDE.match(text)
        if found is None or found["name"] not in NAMES:
            raise ValueError(
                f"A side must be one of {', '.join(NAMES)}, with a number of "
                f"steps per execution as in tfdistill_x10; received {text!r}."
            )
        steps = found["steps"] or "1"
        return cls(found["name"], int(steps) if steps.isdigit() else steps)

    @property
    def is_alone(self) -> bool:
        """Whether it runs in one process."""
        return self.name == _ALONE


def _work(options: programs.Options) -> int:
    """Trains one side and writes what was measured to the workdir."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    from tfdistill.cluster import identity as identity_lib

    identity = identity_lib.Cluster.from_env()
    side = Side.of(options.task)
    setting = click_training.SETTINGS[options.setting]
    rates = _train(side, setting, identity, options)
    path = pathlib.Path(identity.workdir or ".", RESULT)
    path.write_text(json.dumps(rates), "utf-8")
    # Nothing is left to be saved, and servers may take long to let go.
    os._exit(0)


def _train(
    side: Side,
    setting: click_training.Setting,
    identity: Any,
    options: programs.Options,
) -> list[float]:
    strategy = _strategy(side, identity)
    if side.name == "keras":
        return _keras_loop(side, setting, strategy, options)
    data: Any = click_training.data_function(setting)
    if side.name.startswith("tf_keras"):
        import tf_keras as keras_like

        with strategy.scope():
            model = click_training.tf_keras_model(
                setting,
                optimizer=side.name.split("_")[2],
                steps_per_execution=side.steps_per_execution,
            )
        # As its `fit` asks for it.
        data = keras_like.utils.experimental.DatasetCreator(data)
    else:
        import keras as keras_like

        with strategy.scope():
            model = click_training.our_model(
                setting, steps_per_execution=side.steps_per_execution
            )
        data = data() if side.is_alone else data
    return click_training.fit(
        keras_like,
        model,
        data,
        options,
        batch_size=setting.batch_size,
    )


def _strategy(side: Side, identity: Any) -> Any:
    """Makes the strategy; does not return on workers and servers."""
    import tensorflow as tf

    import tfdistill
    from tfdistill.cluster import signs

    partitioners = tf.distribute.experimental.partitioners
    partitioned = side.name.startswith("tf_keras") and not (
        side.name.endswith("_whole")
    )
    if not (partitioned and identity.is_chief):
        return tfdistill.make_strategy(identity)
    num_servers = len(identity.spec["ps"])
    made = (
        partitioners.FixedShardsPartitioner(num_servers)
        if side.name.endswith("_halves")
        else partitioners.MinSizePartitioner(
            _MIN_SHARD_BYTES, max_shards=num_servers
        )
    )
    signs.announce(signs.STARTING)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({k: list(v) for k, v in identity.spec.items()}),
        task_type=identity.task_type,
        task_id=identity.task_index,
        rpc_layer="grpc",
    )
    strategy = tf.distribute.ParameterServerStrategy(
        resolver, variable_partitioner=made
    )
    signs.announce(signs.READY)
    return strategy


def _timed_epochs(run: Any, options: programs.Options) -> list[float]:
    """Runs epochs of `run(num_steps)`; leaves the first one out."""
    setting = click_training.SETTINGS[options.setting]
    rates = []
    for _ in range(1 + options.epochs):
        start = time.perf_counter()
        run(options.steps)
        secs = time.perf_counter() - start
        rates.append(options.steps * setting.batch_size / secs)
    return rates[1:]


def _keras_loop(
    side: Side,
    setting: click_training.Setting,
    strategy: Any,
    options: programs.Options,
) -> list[float]:
    """Keras 3's own layers and optimizer, scheduled by hand."""
    import keras
    import tensorflow as tf

    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        table = keras.layers.Embedding(setting.num_rows, setting.dim)
        offsets = click_training.field_offsets(setting)
        model = click_training.click_model(
            keras, setting, lambda ids: table(ids + offsets)
        )
        optimizer = keras.optimizers.Adagrad(click_training.LEARNING_RATE)
        optimizer.build(model.trainable_variables)
    loss_of = keras.losses.BinaryCrossentropy(from_logits=True)

    def step(features: Any, clicks: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(clicks, model(features, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    @tf.function(autograph=False)
    def execute(iterator: Any) -> Any:
        for _ in range(side.steps_per_execution):
            loss = strategy.run(step, args=iterator.get_next())
        return loss

    data = iter(
        coordinator.create_per_worker_dataset(
            click_training.data_function(setting)
        )
    )

    def run(num_steps: int) -> None:
        for _ in range(num_steps // side.steps_per_execution):
            coordinator.schedule(execute, args=(data,))
        coordinator.join()

    return _timed_epochs(run, options)


def _add_options(options: programs.Program) -> None:
    for name, text in (
        ("task", "<SIDE>: the side to measure, such as tfdistill_x10"),
        ("setting", "<NAME>: a setting of click_training"),
    ):
        options.add(name, text, required=True)
    options.add("steps", "steps an epoch", kind=int, required=True)
    options.add("epochs", "measured epochs", kind=int, required=True)


PROGRAM = programs.Program(
    name="python -m benchmarks.parameter_server_task",
    about=__doc__,
    define=_add_options,
    run=_work,
)

if __name__ == "__main__":
    PROGRAM.start()
