"""One task of the run that benchmarks.recovery breaks.

Its chief notes each step in DIR/group_<g>_steps.txt, as number and monotonic
seconds. A task hangs with Python's lock held once DIR/<task>.hang appears.
"""

import ctypes
import pathlib
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdistill
from tfdistill.cluster import replicas
from tfdistill.training import steps

BACKUP_STEPS = 20
_STEP_SECS = 0.03
_NUM_STEPS = 10**6


class Steps(steps.SteppedCallback):
    """Notes the steps, slowly, and hangs when told to."""

    def __init__(self, workdir: pathlib.Path, cluster: Any) -> None:
        """Knows where to write and what to look for."""
        super().__init__()
        kind = f"{cluster.task_type}_{cluster.task_index}"
        self._hang = workdir / f"group_{cluster.group}_{kind}.hang"
        self._path = workdir / f"group_{cluster.group}_steps.txt"

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Hangs, when told to."""
        super().on_train_batch_begin(batch, logs)
        if self._hang.exists():
            self._hang.unlink()
            ctypes.PyDLL(None).sleep(600)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Notes a step."""
        super().on_train_batch_end(batch, logs)
        time.sleep(_STEP_SECS)
        if replicas.is_chief(self.model.distribute_strategy):
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{self.step} {time.monotonic()}\n")


def main() -> None:
    """Trains until the end of the run."""
    cluster = tfdistill.Cluster.from_env()
    workdir = pathlib.Path(str(cluster.workdir))
    strategy = tfdistill.make_strategy(cluster)
    with strategy.scope():
        model = tfdistill.CodistillModel(
            keras.Sequential(
                [
                    keras.Input((8,)),
                    keras.layers.Dense(32, activation="relu"),
                    keras.layers.Dense(1),
                ]
            )
        )
        model.compile("sgd", "mse")
    x = np.ones((256, 8), "float32")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1]))
    backup = tfdistill.callbacks.Backup(
        workdir / f"group_{cluster.group}" / "backup", every_steps=BACKUP_STEPS
    )
    model.fit(
        data.repeat().batch(16),
        steps_per_epoch=_NUM_STEPS,
        verbose=0,
        callbacks=[Steps(workdir, cluster), backup],
    )


if __name__ == "__main__":
    main()
