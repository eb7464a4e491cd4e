"""One worker that trains with the callbacks people use, and notes all logs."""

import json
import pathlib
import random
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfdistill
from tests.cases import training as training_cases


class Notes(keras.callbacks.Callback):
    """Every log that Keras hands out, batch by batch."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list = []
        self.epochs: list = []
        self.rates: list = []

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append({k: float(v) for k, v in logs.items()})

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append({k: float(v) for k, v in logs.items()})
        # Read and set as plain Keras lets callbacks, on every worker.
        optimizer = self.model.optimizer
        optimizer.learning_rate.assign(float(optimizer.learning_rate) / 2)
        self.rates.append(
            [float(optimizer.learning_rate), int(optimizer.iterations)]
        )


class Monitor(keras.callbacks.RemoteMonitor):
    """Keeps what it would send."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list = []

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(epoch)


class LateFile(keras.callbacks.Callback):
    """Writes a file on the chief, long after the last step."""

    chief_only = True

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__()
        self._path = path

    def on_train_end(self, logs=None):
        time.sleep(2.0)
        self._path.write_text("complete")


class Alone(keras.callbacks.Callback):
    """Decides on each worker what should be alike on all."""

    def __init__(self, worker: int, what: str) -> None:
        super().__init__()
        self._worker, self._what = worker, what
        self._num_batches = 0
        self.rates: list = []

    def on_epoch_end(self, epoch, logs=None):
        if self._what == "rate":
            self.model.optimizer.learning_rate = 0.01 * (1 + self._worker)
        if self._what == "weights" and self._worker:
            weights = self.model.get_weights()
            self.model.set_weights([2 * each for each in weights])

    def on_train_batch_end(self, batch, logs=None):
        self._num_batches += 1
        self.rates.append(round(float(self.model.optimizer.learning_rate), 4))
        if self._what == "stop" and self._worker and self._num_batches == 7:
            self.model.stop_training = True


def decided_alone(model, worker: int, x, y) -> dict:
    """What comes of it."""
    found = {}
    for what in ("rate", "stop", "weights"):
        callback = Alone(worker, what)
        try:
            model.fit(x, y, batch_size=10, epochs=2, callbacks=[callback])
            found[what] = callback.rates
        except RuntimeError as error:
            found[what] = str(error)
    return found


def main(directory: str) -> None:
    strategy = tfdistill.make_strategy()
    worker = tfdistill.Cluster.from_env().task_index
    out = pathlib.Path(directory)
    # Each in a folder of its own name, to see who wrote what.
    files = out / f"files_{worker}"
    files.mkdir(parents=True)
    # What draws without a seed draws the same, though nobody has set one.
    order = tf.data.Dataset.range(50).shuffle(50)
    drawn = [random.random(), np.random.rand(), *map(int, order)]
    # Workers with other seeds must still shuffle alike and start alike.
    keras.utils.set_random_seed(worker)
    with strategy.scope():
        model = tfdistill.CodistillModel(training_cases.dense(keras.Model))
        model.compile(keras.optimizers.SGD(0.5), "mse", metrics=["mae"])
    x, y = training_cases.regression(50)
    notes, monitor = Notes(), Monitor()
    checkpoint = keras.callbacks.ModelCheckpoint(
        files / "best.keras",
        monitor="val_loss",
        mode="max",
        save_best_only=True,
    )
    weights = keras.callbacks.ModelCheckpoint(
        files / "{epoch}.weights.h5", save_weights_only=True
    )
    history = model.fit(
        x,
        y,
        batch_size=8,
        epochs=4,
        verbose=1,
        validation_split=0.2,
        callbacks=[
            checkpoint,
            weights,
            keras.callbacks.TensorBoard(files / "board", histogram_freq=1),
            keras.callbacks.CSVLogger(files / "log.csv"),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate),
            keras.callbacks.ReduceLROnPlateau(
                monitor="val_loss", patience=1, factor=0.5, min_delta=100.0
            ),
            # The loss falls, which is worse here: the first epoch was the best.
            keras.callbacks.EarlyStopping(
                monitor="val_loss",
                mode="max",
                patience=2,
                restore_best_weights=True,
            ),
            keras.callbacks.TerminateOnNaN(),
            monitor,
            notes,
            LateFile(out / "late.txt"),
        ],
    )
    # Not a data set, of which the chief is warned.
    rows = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(50, seed=worker)
    model.evaluate(rows.batch(8), verbose=0)
    result = {
        "drawn": drawn,
        "saw_late_file": (out / "late.txt").exists(),
        "history": {k: list(map(float, v)) for k, v in history.history.items()},
        "batches": notes.batches,
        "epochs": notes.epochs,
        "rates": notes.rates,
        "weights": [w.tolist() for w in model.get_weights()],
        "prediction": np.asarray(
            model.predict(x, batch_size=8, verbose=0)
        ).tolist(),
        "files": sorted(
            str(p.relative_to(files)) for p in files.rglob("*") if p.is_file()
        ),
        "monitored": monitor.epochs,
    }
    result["decided_alone"] = decided_alone(model, worker, x, y)
    (out / f"worker_{worker}.json").write_text(json.dumps(result))
    if not worker:
        model.predict(x, verbose=0)  # Alone: an error, and the end.


if __name__ == "__main__":
    main(sys.argv[1])
