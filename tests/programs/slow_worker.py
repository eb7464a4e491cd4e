"""One of two workers, of which one is slow for a while, in several ways."""

import json
import pathlib
import sys
import time

import keras
import tensorflow as tf

import tfdistill
from tests.cases import training as training_cases

NUM_STEPS = 50
_NAP_SECS = 0.2


class Nap(keras.callbacks.Callback):
    """Takes time after each step."""

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(_NAP_SECS)


class Notes(keras.callbacks.Callback):
    """Who was slow, as this worker knew after each step."""

    def __init__(self):
        super().__init__()
        self.slow = []

    def on_train_batch_end(self, batch, logs=None):
        self.slow.append(list(self.model.trainer.worker_waits.slow))


def _nap(x):
    time.sleep(_NAP_SECS)
    return x


def _slow(x, y):
    napped = tf.numpy_function(_nap, [x], x.dtype)
    return tf.ensure_shape(napped, x.shape), y


def main(directory: str) -> None:
    strategy = tfdistill.make_strategy()
    worker = tfdistill.Cluster.from_env().task_index
    with strategy.scope():
        model = tfdistill.DistributedModel(training_cases.dense(keras.Model))
        model.compile("sgd", "mse")
    x, y = training_cases.regression(8)
    # The last batch is small: each step asks first how many rows all have.
    data = tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(8)
    options = tf.data.Options()
    policy = tf.data.experimental.AutoShardPolicy.DATA
    options.experimental_distribute.auto_shard_policy = policy
    found = {}
    for how in ("fair", "callback", "fair_again", "data"):
        seen, notes = data, Notes()
        if how == "data" and worker == 0:
            seen = data.map(_slow)
        naps = [Nap()] if how == "callback" and worker == 1 else []
        model.fit(
            seen.with_options(options),
            steps_per_epoch=NUM_STEPS,
            callbacks=[*naps, notes],
            verbose=0,
        )
        found[how] = notes.slow
    path = pathlib.Path(directory, f"worker_{worker}.json")
    path.write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
