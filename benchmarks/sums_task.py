"""One side of `sums`: trains a model of bags and a factorization machine.

Workers and parameter servers serve; what follows runs on the chief.
"""

from typing import Any

import numpy as np

from benchmarks import click_training
from benchmarks import parameter_server_task
from tfdistill.system import programs

NUM_BAGS, BAG_SIZE, NUM_FIELDS = 4, 50, 26
DIM, BATCH_SIZE = 16, 1024
ZIPF_EXPONENT = 1.2
_ROWS, _NUM_BATCHES = 200_000, 8
SIDES = {"workers": False, "servers": True}


def arrays(
    exponent: float = ZIPF_EXPONENT,
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Makes bags and ids, whose fields follow a Zipf law, and clicks.

    Args:
        exponent: Of the law.

    Returns:
        int64 `[n, 4, 50]` and `[n, 26]`, each field counting from 0; float32
        `[n, 1]`.
    """
    rng = np.random.default_rng(0)
    count = _NUM_BATCHES * BATCH_SIZE

    def ids(*shape: int) -> np.ndarray:
        return (rng.zipf(exponent, (count, *shape)) - 1) % _ROWS

    features = {"bags": ids(NUM_BAGS, BAG_SIZE), "ids": ids(NUM_FIELDS)}
    return features, (rng.random((count, 1)) < 0.25).astype("float32")


def num_bytes(
    features: dict[str, np.ndarray], *, num_servers: int
) -> dict[str, int]:
    """Counts what the lookups of one batch send, by side.

    Args:
        features: As `arrays` makes them, of one batch.
        num_servers: Which hold a shard each.
    """
    sent = [
        table.num_bytes(ids, num_servers=num_servers)
        for table, ids in zip(
            _tables(on_servers=False), _looked_up(**features), strict=True
        )
    ]
    return {
        side: sum(each["sums" if on_servers else "rows"] for each in sent)
        for side, on_servers in SIDES.items()
    }


def _tables(*, on_servers: bool) -> list[Any]:
    """Returns the tables of means, of pairs, and of the linear term."""
    from tfdistill import layers

    sizes = [_ROWS] * NUM_FIELDS
    return [
        layers.ShardedEmbedding(
            ids, dim, combiner=combiner, combine_on_servers=on_servers
        )
        for ids, dim, combiner in (
            (sizes[:NUM_BAGS], DIM, "mean"),
            (sizes, DIM, "fm"),
            (sum(sizes), 1, "sum"),
        )
    ]


def _looked_up(bags: Any, ids: Any) -> list[Any]:
    """Returns the ids that each of the tables looks up."""
    return [bags, ids, ids + np.arange(NUM_FIELDS) * _ROWS]


def student(*, on_servers: bool) -> Any:
    """Builds the model: bags into a small network, and an FM of the ids.

    Args:
        on_servers: Whether servers combine.
    """
    import keras

    bags = keras.Input((NUM_BAGS, BAG_SIZE), dtype="int64", name="bags")
    ids = keras.Input((NUM_FIELDS,), dtype="int64", name="ids")
    tables = _tables(on_servers=on_servers)
    means, pairs, linear = (
        table(each)
        for table, each in zip(tables, _looked_up(bags, ids), strict=True)
    )
    hidden = keras.layers.Flatten()(means)
    hidden = keras.layers.Dense(64, activation="relu")(hidden)
    logit = keras.layers.Dense(1)(hidden) + pairs + linear
    return keras.Model({"bags": bags, "ids": ids}, logit)


def work(options: programs.Options) -> None:
    """Trains one side and writes what it took to the workdir.

    Args:
        options: The options of the command line.
    """
    import keras

    import tfdistill

    identity = tfdistill.Cluster.from_env()
    with parameter_server_task.behind_links(identity, 0.0) as (cluster, count):
        strategy = tfdistill.make_strategy(cluster)
        with strategy.scope():
            model = _compiled(on_servers=SIDES[options.side])
        found = click_training.fit(
            keras,
            model,
            _dataset,
            options,
            batch_size=BATCH_SIZE,
            num_bytes=count,
        )
        parameter_server_task.end(cluster, found)


def _compiled(*, on_servers: bool) -> Any:
    import keras

    import tfdistill

    keras.utils.set_random_seed(0)
    model = tfdistill.CodistillModel(student(on_servers=on_servers))
    model.compile(
        keras.optimizers.Adagrad(0.01),
        keras.losses.BinaryCrossentropy(from_logits=True),
        steps_per_execution=10,
    )
    return model


def _dataset(context: Any = None) -> Any:
    import tensorflow as tf

    del context  # Every worker reads the same batches.
    data = tf.data.Dataset.from_tensor_slices(arrays())
    return data.batch(BATCH_SIZE, drop_remainder=True).cache().repeat()


def _add_options(options: programs.Flags) -> None:
    options.add("side", "<SIDE>: who combines", required=True)
    parameter_server_task.add_epochs(options)


PROGRAM = parameter_server_task.program(
    "sums_task", __doc__, define=_add_options, run=work
)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
