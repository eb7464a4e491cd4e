"""A worker of a group whose chief decides on other batch sizes.

python tests/programs/batch_sizes.py DIR
"""

import json
import pathlib
import sys

import keras
import tensorflow as tf

import tfdistill
from tfdistill.contrib import batch_scaler

NUM_STEPS = 20
EVERY_STEPS = 5
FIRST, SECOND, RATE = 8, 12, 1e-5


def rows():
    """The n-th row holds n, and n / 100 as its target."""

    def row(number):
        x = tf.cast([number], tf.float32)
        return x, x / 100

    return tf.data.Dataset.range(10_000).map(row).repeat()


class _Scaler(batch_scaler.BatchScaler):
    """Knows of a peer, of which the workers think differently."""

    def _speeds(self):
        return [1.0, 1.0]


def main() -> None:
    """Trains, and notes the examples of each step and the weights."""
    cluster = tfdistill.Cluster.from_env()
    strategy = tfdistill.make_strategy(cluster)
    batch_scaler.next_size = lambda *args, **kwargs: (
        SECOND if cluster.is_chief else 2 * SECOND
    )
    scaler = _Scaler(
        tfdistill.Exchange(None), batch_size=FIRST, every_steps=EVERY_STEPS
    )
    with strategy.scope():
        dense = keras.layers.Dense(1, kernel_initializer="zeros")
        model = tfdistill.CodistillModel(
            keras.Sequential([keras.Input((1,)), dense])
        )
        model.compile(keras.optimizers.SGD(scaler.scaled(RATE)), "mse")

    def batches(worker):
        part = tfdistill.data.worker_shard(rows(), worker)
        return scaler.batched(part, worker)

    sizes = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: sizes.append(
            int(model.trainer.last.examples)
        )
    )
    model.fit(
        batches,
        steps_per_epoch=NUM_STEPS,
        callbacks=[scaler, note],
        verbose=0,
    )
    weights = [weight.item() for weight in model.get_weights()]
    path = pathlib.Path(sys.argv[1], f"notes_{cluster.task_index}.json")
    path.write_text(json.dumps({"sizes": sizes, "weights": weights}))


if __name__ == "__main__":
    main()
