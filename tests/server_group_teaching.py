"""A student that learns from known versions, and one that is resumed.

The peer's versions were published before, so that one process and a group of
one worker can learn from the same ones at the same steps.
"""

import pathlib
from typing import Any

import codistillation_cases
import keras
import numpy as np
import server_group_cases as cases
import tensorflow as tf

import tfdistill

VERSIONS = (10, 20)
NUM_EPOCHS, NUM_STEPS = 3, 7
# A backup is due after 10 steps, and taken once the execution of 5 steps that
# is in flight by then has ended.
BACKUP_STEPS, BACKED_UP_STEPS, RESUMED_STEPS = 10, 15, 30


class TracedModel(tfdistill.CodistillModel):
    """Keeps the graphs that its training step was traced in."""

    def train_step(self, data: Any) -> Any:
        """Notes the graph."""
        self.note_graph(tf.compat.v1.get_default_graph())
        return super().train_step(data)


class Teaching(keras.callbacks.Callback):
    """Has version 10 in force from the first step, 20 after an epoch."""

    def __init__(self, directory: pathlib.Path) -> None:
        super().__init__()
        self._directory = directory
        self.graphs: list = []
        self.num_traced: list = []

    def on_train_begin(self, logs=None):
        self.model.note_graph = self.graphs.append
        self._load(VERSIONS[0])

    def on_epoch_begin(self, epoch, logs=None):
        remote = self.model.teachers.remote
        if epoch == 2 and remote:
            # The worker has what it needs by now and must not ask again.
            for master in masters(self.model):
                master.assign(np.full(master.shape, np.nan, "float32"))

    def on_epoch_end(self, epoch, logs=None):
        self.num_traced.append(len(self.graphs))
        if epoch == 0:
            self._load(VERSIONS[1])

    def _load(self, step: int) -> None:
        target = self._directory / "exchange" / "group_1" / str(step)
        target.parent.mkdir(parents=True, exist_ok=True)
        kept = self._directory / f"kept_{step}" / "group_1" / str(step)
        kept.rename(target)
        codistillation_cases.load(self.model, step)


def masters(model: tfdistill.CodistillModel) -> list[tf.Variable]:
    """The servers' copies of the teachers' dense weights."""
    slots = model.teachers.remote.slots
    return [v for slot in slots for v in slot._masters.values()]


def _data() -> tf.data.Dataset:
    dataset = tf.data.Dataset.from_tensor_slices(cases.clicks())
    return dataset.repeat().batch(cases.BATCH_SIZE)


def _loss() -> keras.losses.Loss:
    return keras.losses.BinaryCrossentropy(from_logits=True)


def publish(directory: pathlib.Path) -> None:
    """Publishes two versions of a peer that trains in one process."""
    keras.utils.set_random_seed(11)
    peer = tfdistill.CodistillModel(cases.click_student())
    peer.compile(keras.optimizers.Adagrad(0.3), _loss())
    for step in VERSIONS:
        exporter = tfdistill.StudentExporter(
            tfdistill.Exchange(directory / f"kept_{step}"),
            every_steps=1000,
            group=1,
        )
        peer.fit(
            _data(),
            steps_per_epoch=10,
            verbose=0,
            shuffle=False,
            callbacks=[exporter],
        )


def learn(directory: pathlib.Path, strategy: Any) -> tuple[dict, Any, Any]:
    """Trains with what `publish` left in the directory; exports at the end.

    Returns:
        What must not depend on the strategy, the model and the callback.
    """
    exchange = tfdistill.Exchange(directory / "exchange", key=None)
    keras.utils.set_random_seed(3)
    on_servers = isinstance(strategy, tf.distribute.ParameterServerStrategy)
    with strategy.scope():
        model = TracedModel(
            cases.click_student(),
            teachers=tfdistill.TeacherSet(exchange, [1], poll_secs=0.02),
        )
        model.compile(
            keras.optimizers.Adagrad(0.1),
            _loss(),
            distillation_loss=tfdistill.losses.BinarySoftTargetCrossEntropy(),
            distillation_weight=tfdistill.schedules.BurnIn(steps=3, weight=0.7),
            steps_per_execution=5 if on_servers else 1,
        )
    teaching = Teaching(directory)
    history = model.fit(
        _data(),
        epochs=NUM_EPOCHS,
        steps_per_epoch=NUM_STEPS,
        shuffle=False,
        verbose=0,
        callbacks=[
            codistillation_cases.never(),
            tfdistill.StudentExporter(exchange, every_steps=1000, group=0),
            teaching,
        ],
    )
    results = {f"log_{k}": np.array(v) for k, v in history.history.items()}
    results |= cases.weights(model.student)
    x, y = cases.clicks()
    given = tf.data.Dataset.from_tensor_slices((x, y)).batch(20)
    results["prediction"] = np.asarray(model.predict(given, verbose=0))
    return results, model, teaching


class _StopTraining(Exception):
    """Ends `fit` as a crash would."""


class _Crash(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 > BACKED_UP_STEPS:
            raise _StopTraining


class _Begin(keras.callbacks.Callback):
    """Notes what training begins with."""

    def on_train_begin(self, logs=None):
        self.weights = cases.weights(self.model.student)
        self.step = int(self.model.optimizer.iterations.numpy())


def _plain_model(strategy: Any, seed: int) -> tfdistill.CodistillModel:
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = tfdistill.CodistillModel(cases.click_student())
        model.compile(
            keras.optimizers.Adam(0.02), _loss(), steps_per_execution=5
        )
    return model


def crash_and_resume(directory: pathlib.Path, strategy: Any) -> dict:
    """Is cut off after a backup, and goes on with another model."""
    fit = {"epochs": 2, "steps_per_epoch": RESUMED_STEPS, "verbose": 0}

    def backup() -> tfdistill.Backup:
        return tfdistill.Backup(directory, every_steps=BACKUP_STEPS)

    try:
        _plain_model(strategy, 3).fit(
            _data(), callbacks=[backup(), _Crash()], **fit
        )
    except _StopTraining:
        pass
    begin = _Begin()
    model = _plain_model(strategy, 4)
    history = model.fit(_data(), callbacks=[backup(), begin], **fit)
    return {
        "step": begin.step,
        "epochs": np.array(history.epoch),
        "loss": np.array(history.history["loss"]),
        "iterations": model.optimizer.iterations.numpy(),
        **{f"begin_{k}": v for k, v in begin.weights.items()},
        **{f"end_{k}": v for k, v in cases.weights(model.student).items()},
    }


def resume_by_hand() -> dict:
    """What `crash_and_resume` must come to: its data start anew."""
    model = _plain_model(tf.distribute.get_strategy(), 3)

    def fit(epochs: int) -> list[float]:
        history = model.fit(
            _data(),
            epochs=epochs,
            steps_per_epoch=BACKED_UP_STEPS,
            shuffle=False,
            verbose=0,
        )
        return history.history["loss"]

    # Halves of the two epochs.
    losses = fit(1)
    begin = cases.weights(model.student)
    losses += fit(3)
    return {
        "step": BACKED_UP_STEPS,
        "epochs": np.array([0, 1]),
        "loss": np.reshape(losses, [2, -1]).mean(axis=1),
        "iterations": 2 * RESUMED_STEPS,
        **{f"begin_{k}": v for k, v in begin.items()},
        **{f"end_{k}": v for k, v in cases.weights(model.student).items()},
    }
