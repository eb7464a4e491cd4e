"""One task of the parameter-server benchmark: one side in a fresh cluster.

Workers and parameter servers serve; what follows runs on the chief, or in the
only process where there is no cluster.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import time
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from typing import NoReturn

from benchmarks import click_training
from benchmarks import slow_links
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
# Ours with other tables.
_KINDS = {
    f"{name}_{kind}": kind
    for name in (_OURS, _ALONE)
    for kind in (
        click_training.BY_ID,
        click_training.FEATURES,
        click_training.APART,
    )
}
NAMES = (_OURS, "keras", _ALONE, *_KINDS, *TF_KERAS)
_MIN_SHARD_BYTES = 256 * 1024
_SIDE = re.compile(
    r"^(?P<name>.+?)(_ahead(?P<ahead>\d+))?(_x(?P<steps>\d+|auto))?$"
)


@dataclasses.dataclass(frozen=True)
class Side:
    """Who trains.

    Attributes:
        name: Such as `"tfdistill"` or `"tf_keras_legacy_halves"`.
        steps_per_execution: Steps a call; "auto" with tfdistill only.
        rows_ahead: How many batches ahead rows are fetched; tfdistill only.
    """

    name: str
    steps_per_execution: Any
    rows_ahead: int = 0

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
        return cls(
            found["name"],
            int(steps) if steps.isdigit() else steps,
            int(found["ahead"] or 0),
        )

    @property
    def is_alone(self) -> bool:
        """Whether it runs in one process."""
        return self.name.startswith(_ALONE)


def work(options: programs.Options) -> None:
    """Trains one side and writes what was measured to the workdir.

    Args:
        options: The options of the command line.
    """
    from tfdistill.cluster import identity as identity_lib

    identity = identity_lib.Cluster.from_env()
    side = Side.of(options.task)
    setting = click_training.SETTINGS[options.setting]
    with behind_links(identity, options.link_ms) as (cluster, num_bytes):
        end(cluster, _train(side, setting, cluster, options, num_bytes))


@contextlib.contextmanager
def behind_links(
    identity: Any, link_ms: float | None
) -> Iterator[tuple[Any, Callable[[], int] | None]]:
    """Puts a link before each worker and server; only the chief does.

    Args:
        identity: This task's `Cluster`.
        link_ms: Milliseconds that a link delays each way. None: no links.

    Yields:
        The `Cluster` to train with, and what tells how many bytes travelled.
    """
    if link_ms is None or not identity.is_chief:
        yield identity, None
        return
    others = {k: v for k, v in identity.spec.items() if k != "chief"}
    with slow_links.before(others, delay_secs=link_ms / 1000) as links:
        spec = {**identity.spec, **links.spec}
        yield dataclasses.replace(identity, spec=spec), links.num_bytes


def end(identity: Any, found: Any) -> NoReturn:
    """Ends the chief, and writes what it found to the workdir.

    Args:
        identity: The chief's `Cluster`.
        found: Anything that JSON holds.
    """
    path = pathlib.Path(identity.workdir or ".", RESULT)
    path.write_text(json.dumps(found), "utf-8")
    # Nothing is left to be saved, and servers may take long to let go.
    os._exit(0)


def _train(
    side: Side,
    setting: click_training.Setting,
    identity: Any,
    options: programs.Options,
    num_bytes: Callable[[], int] | None = None,
) -> dict[str, Any]:
    strategy = _strategy(side, identity)
    if side.name == "keras":
        return {"rates": _keras_loop(side, setting, strategy, options)}
    data: Any = click_training.data_function(setting)
    if side.name.startswith("tf_keras"):
        import tf_keras as keras_like

        with strategy.scope():
            model = click_training.tf_keras_model(
                setting,
                optimizer=side.name.split("_")[2],
                steps_per_execution=side.steps_per_execution,
            )
        data = tf_keras_data(data)
    else:
        import keras as keras_like

        with strategy.scope():
            model = click_training.our_model(
                setting,
                steps_per_execution=side.steps_per_execution,
                kind=_KINDS.get(side.name, ""),
                rows_ahead=side.rows_ahead,
            )
        data = data() if side.is_alone else data
    return click_training.fit(
        keras_like,
        model,
        data,
        options,
        batch_size=setting.batch_size,
        num_bytes=num_bytes,
    )


def tf_keras_data(function: Any) -> Any:
    """Wraps a data set function as tf_keras' `fit` asks for it."""
    import tf_keras

    return tf_keras.utils.experimental.DatasetCreator(function)


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


def _add_options(options: programs.Flags) -> None:
    for name, text in (
        ("task", "<SIDE>: the side to measure, such as tfdistill_x10"),
        ("setting", "<NAME>: a setting of click_training"),
    ):
        options.add(name, text, required=True)
    add_epochs(options)
    options.add(
        "link_ms",
        "<MS>: what a link before each worker and server delays, each way; "
        "bytes are counted there. Default: no links",
        kind=float,
    )


def add_epochs(options: programs.Flags) -> None:
    """Adds the options of `click_training.fit`.

    Args:
        options: Of a task.
    """
    for name, text in (
        ("steps", "steps an epoch"),
        ("epochs", "measured epochs"),
    ):
        options.add(name, text, kind=int, required=True)


def program(
    name: str,
    about: str,
    *,
    define: Callable[[programs.Flags], None],
    run: Callable[[programs.Options], None],
) -> programs.Program:
    """Makes the program of a benchmark's task, which sees no GPU.

    Args:
        name: Of its module.
        about: What it does.
        define: Adds its options.
        run: Does it.
    """

    def on_cpus(options: programs.Options) -> int:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
        run(options)
        return 0

    return programs.Program(
        name=f"python -m benchmarks.{name}",
        about=about,
        define=define,
        run=on_cpus,
    )


PROGRAM = program(
    "parameter_server_task", __doc__, define=_add_options, run=work
)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
