"""A training that stays in one phase until it is told to end.

Usage: python -m tests.programs.preemption PHASE DIR. DIR/<phase>_<task index>
tells that the phase is reached.
"""

import pathlib
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfdistill

BATCH_SIZE = 4


class Slow(keras.layers.Layer):
    """Has TensorFlow wait for ever in an operation, once it is told to."""

    def __init__(self):
        super().__init__()
        self.is_slow = self.add_weight(
            shape=(), initializer="zeros", trainable=False
        )

    def call(self, x):
        def wait():
            return tf.ensure_shape(
                tf.numpy_function(_sleep, [], tf.float32), []
            )

        added = tf.cond(self.is_slow > 0, wait, lambda: 0.0)
        return x + tf.stop_gradient(added)


def _sleep():
    time.sleep(600)
    return np.float32(0.0)


class Hangs(keras.layers.Layer):
    """Is traced for ever."""

    def call(self, x, training=False):
        if training:
            Phase.reached()
            time.sleep(600)
        return x


class Phase(keras.callbacks.Callback):
    """Begins the phase after a few steps."""

    directory = pathlib.Path()
    name = ""
    index = 0

    def __init__(self, slow):
        super().__init__()
        self._slow = slow

    @classmethod
    def reached(cls):
        """Tells that the task is where it should be told to end."""
        (cls.directory / f"{cls.name}_{cls.index}").touch()

    def on_train_batch_end(self, batch, logs=None):
        if batch < 3:
            return
        if self.name == "step":
            self._slow.is_slow.assign(1.0)
        if self.name in ("step", "backup"):
            self.reached()
        if self.name == "backup":
            time.sleep(0.1)
        if self.name == "collective":
            self.reached()
            if self.index == 1:
                time.sleep(600)

    def on_test_begin(self, logs=None):
        if self.name == "evaluation":
            self._slow.is_slow.assign(1.0)
            self.reached()


def _waiting(name):
    """Makes a method of the exchange that never returns."""

    def wait(self, *args, **kwargs):
        (Phase.directory / name).touch()
        if all((Phase.directory / n).exists() for n in ("publish", "latest")):
            Phase.reached()
        time.sleep(600)

    return wait


def main(phase: str, directory: pathlib.Path) -> None:
    cluster = tfdistill.Cluster.from_env()
    Phase.directory, Phase.name = directory, phase
    Phase.index = cluster.task_index
    if phase == "start":
        Phase.reached()
    strategy = tfdistill.make_strategy(cluster)
    exchange = tfdistill.Exchange(directory / "exchange", key=None)
    if phase == "exchange":
        tfdistill.Exchange.publish = _waiting("publish")
        tfdistill.Exchange.latest = _waiting("latest")
    with strategy.scope():
        slow = Slow()
        layers = [keras.Input((3,)), slow, keras.layers.Dense(1)]
        if phase == "trace":
            layers.append(Hangs())
        model = tfdistill.CodistillModel(
            keras.Sequential(layers),
            teachers=tfdistill.teachers.Peers(exchange, peers=[1])
            if phase == "exchange"
            else None,
        )
        model.compile(
            keras.optimizers.SGD(0.0),
            "mse",
            distillation_loss=tfdistill.losses.LogitsMeanSquaredError(
                from_logits=True
            ),
            distillation_weight=1.0,
        )
    callbacks = [Phase(slow)]
    if phase == "exchange":
        callbacks.append(
            tfdistill.callbacks.StudentExporter(exchange, every_steps=5)
        )
        callbacks.append(tfdistill.callbacks.TeacherLoader(every_steps=5))
    if phase == "backup":
        callbacks.append(
            tfdistill.callbacks.Backup(directory / "backup", every_steps=10**6)
        )
    x = np.ones((4 * BATCH_SIZE, 3), "float32")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1]))
    model.fit(
        data.repeat().batch(BATCH_SIZE),
        steps_per_epoch=10 if phase == "evaluation" else 10**6,
        validation_data=data.batch(BATCH_SIZE),
        verbose=0,
        callbacks=callbacks,
    )


if __name__ == "__main__":
    main(sys.argv[1], pathlib.Path(sys.argv[2]))
