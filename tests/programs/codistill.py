"""A user's own script, made a codistilled one, that notes what it saw.

The lines between the rulers are what the README asks a user to add. A test sees
in the workdir which versions have taught a task, and ends the training of
groups of one worker early with a file `stop`.
"""

import json
import os
import pathlib
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfdistill


class Notes(keras.callbacks.Callback):
    """Which teacher versions were in force at which step."""

    def __init__(self, cluster: tfdistill.Cluster, step_secs: float) -> None:
        super().__init__()
        self._directory = pathlib.Path(cluster.workdir)
        self._task = f"{cluster.group}_{cluster.task_index}"
        self.versions: list = []
        self.weights: list = []
        self._step_secs = step_secs
        self._step = 0

    def on_train_batch_end(self, batch, logs=None):
        self._step += 1
        self.weights.append(float(logs["distillation_weight"]))
        status = self.model.teachers.status()
        self.versions.append([teacher["step"] for teacher in status])
        for version in self.versions[-1]:
            (self._directory / f"taught_{self._task}_{version}").touch()
        if (self._directory / "stop").exists():
            self.model.stop_training = True
        time.sleep(self._step_secs)


def data(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(256, 6)).astype("float32")
    return x, (x @ np.ones([6, 3]) * [1, -1, 0.5]).argmax(1)


def main(num_steps: int, step_secs: float) -> None:
    cluster = tfdistill.Cluster.from_env()
    directory = pathlib.Path(cluster.workdir)
    # ------------------------------------------------------------------
    strategy = tfdistill.make_strategy(cluster)
    exchange = tfdistill.Exchange(cluster.exchange)
    with strategy.scope():
        student = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(16, activation="relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(3),
            ]
        )
        model = tfdistill.CodistillModel(
            student, teachers=tfdistill.teachers.Peers()
        )
        model.compile(
            "sgd",
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            distillation_loss=tfdistill.losses.SoftTargetCrossEntropy(),
            distillation_weight=tfdistill.schedules.BurnIn(steps=10),
        )
    # ------------------------------------------------------------------
    notes = Notes(cluster, step_secs)
    dataset = tf.data.Dataset.from_tensor_slices(data(cluster.group))
    model.fit(
        dataset.repeat().batch(16),
        steps_per_epoch=num_steps // 2,
        epochs=2,
        verbose=0,
        callbacks=[
            tfdistill.callbacks.StudentExporter(exchange, every_steps=10),
            tfdistill.callbacks.TeacherLoader(every_steps=5),
            notes,
        ],
    )
    out = {
        "versions": notes.versions,
        "weights_in_force": notes.weights,
        "student": [w.tolist() for w in student.get_weights()],
        "steps": int(model.optimizer.iterations.numpy()),
        "pid": os.getpid(),
    }
    name = f"notes_{cluster.group}_{cluster.task_index}.json"
    (directory / name).write_text(json.dumps(out))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
