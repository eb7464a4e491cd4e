"""One worker that trains with the callbacks people use, and notes all logs."""

import json
import pathlib
import sys

import keras
import numpy as np

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
        rate = self.model.optimizer.learning_rate
        self.rates.append(float(keras.ops.convert_to_numpy(rate)))


class Monitor(keras.callbacks.RemoteMonitor):
    """Keeps what it would send."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list = []

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(epoch)


def averaged(strategy) -> dict:
    """A second training, with the callbacks that the first has no room for."""
    with strategy.scope():
        model = tfdistill.CodistillModel(training_cases.dense(keras.Model))
        model.compile(
            keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5), "mse"
        )
    x, y = training_cases.regression(48)
    x[32:] = np.nan  # The last two batches of the third epoch and on.
    monitor, ends = Monitor(), []

    def rows(epoch):
        return slice(0, 48 if epoch == 2 else 32)

    losses = []
    for epoch in range(3):
        logs = model.fit(
            x[rows(epoch)],
            y[rows(epoch)],
            batch_size=8,
            shuffle=False,
            verbose=0,
            validation_data=(x[:32], y[:32]),
            callbacks=[
                keras.callbacks.SwapEMAWeights(),
                keras.callbacks.LearningRateScheduler(
                    lambda e, rate, epoch=epoch: 0.1 / (1 + epoch)
                ),
                keras.callbacks.TerminateOnNaN(),
                keras.callbacks.LambdaCallback(
                    on_train_batch_end=lambda batch, logs: ends.append(batch)
                ),
                monitor,
            ],
        ).history
        losses.append(logs["val_loss"][0])
        rate = logs["learning_rate"][0]
    return {
        "averaged_losses": losses,
        "averaged_rate": rate,
        "averaged_batches": ends,
        "monitored": monitor.epochs,
    }


def main(directory: str) -> None:
    strategy = tfdistill.make_strategy()
    worker = tfdistill.Cluster.from_env().task_index
    out = pathlib.Path(directory)
    # Each in a folder of its own name, to see who wrote what.
    files = out / f"files_{worker}"
    files.mkdir(parents=True)
    # Workers with other seeds must still shuffle alike and start alike.
    keras.utils.set_random_seed(worker)
    with strategy.scope():
        model = tfdistill.CodistillModel(training_cases.dense(keras.Model))
        model.compile(keras.optimizers.SGD(0.5), "mse", metrics=["mae"])
    x, y = training_cases.regression(50)
    notes = Notes()
    checkpoint = keras.callbacks.ModelCheckpoint(
        files / "best.keras", monitor="val_loss", save_best_only=True
    )
    weights = keras.callbacks.ModelCheckpoint(
        files / "{epoch}.weights.h5", save_weights_only=True
    )
    history = model.fit(
        x,
        y,
        batch_size=8,
        epochs=12,
        verbose=1,
        validation_split=0.2,
        callbacks=[
            checkpoint,
            weights,
            keras.callbacks.TensorBoard(files / "board", histogram_freq=1),
            keras.callbacks.CSVLogger(files / "log.csv"),
            keras.callbacks.ReduceLROnPlateau(
                monitor="val_loss", patience=1, factor=0.5, min_delta=0.05
            ),
            keras.callbacks.EarlyStopping(
                monitor="val_loss", patience=3, restore_best_weights=True
            ),
            notes,
        ],
    )
    result = {
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
        **averaged(strategy),
    }
    (out / f"worker_{worker}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
