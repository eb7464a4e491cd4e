"""One worker that trains under two experiment trackers, as their pages show."""

import json
import pathlib
import sys

import keras
import mlflow
import wandb
from wandb.integration import keras as wandb_keras

import tfdistill
from tests.cases import training as training_cases


class Predictions(keras.callbacks.Callback):
    """Looks at predictions on the chief only."""

    chief_only = True

    def __init__(self, x) -> None:
        super().__init__()
        self._x = x
        self.shape = ()

    def on_epoch_end(self, epoch, logs=None):
        self.shape = tuple(self.model(self._x[:3], training=False).shape)


def main(directory: str) -> None:
    cluster = tfdistill.Cluster.from_env()
    strategy = tfdistill.make_strategy(cluster)
    # As in a script for one process: each worker asks for a run.
    mlflow.autolog(log_models="models" in sys.argv)
    run = wandb.init(project="tests", dir=directory)
    with strategy.scope():
        model = tfdistill.CodistillModel(training_cases.dense(keras.Model))
        # Nothing is learned, so that each epoch over all data has one loss.
        model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae"])
    x, y = training_cases.regression(32)
    looks = Predictions(x)
    history = model.fit(
        x,
        y,
        batch_size=8,
        epochs=2,
        verbose=0,
        callbacks=[wandb_keras.WandbMetricsLogger(), looks],
    )
    run.finish()
    assert len(model.predict(x, batch_size=8, verbose=0)) == len(x)
    found = {"shape": looks.shape, "losses": history.history["loss"]}
    path = pathlib.Path(directory, f"worker_{cluster.task_index}.json")
    path.write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
