"""One task of a group whose training is killed once, or of one that is not."""

import dataclasses
import json
import os
import pathlib
import signal
import sys

import keras
import numpy as np
import tensorflow as tf

import tfdistill
from tests.cases import backup as cases

CASE = cases.Case(data=cases.finite, fit={}, epochs=3)
KILL_AT = 9


class Kill(keras.callbacks.Callback):
    """Kills its own task, as a preemption would that gives no notice."""

    def __init__(self, backup_dir: pathlib.Path) -> None:
        super().__init__()
        self._backup_dir = backup_dir

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations.numpy()) == KILL_AT:
            cases.wait_for_backup(self._backup_dir, 6)
            os.kill(os.getpid(), signal.SIGKILL)


def main(directory: pathlib.Path) -> None:
    tf.config.experimental.enable_op_determinism()
    cluster = tfdistill.Cluster.from_env()
    strategy = tfdistill.make_strategy(cluster)
    what = ("whole", "killed")[cluster.group]
    backup_dir = directory / "backup"
    is_first = what == "killed" and not backup_dir.exists()
    model, _, backup = cases.train(
        CASE,
        None if what == "whole" else backup_dir,
        strategy=strategy,
        callbacks=[Kill(backup_dir)] * is_first,
    )
    found = cases.values(model, strategy)
    found["resumed_step"] = np.asarray(backup.resumed_step or 0)
    path = directory / f"{what}_{cluster.task_index}.npz"
    np.savez(path, **found)
    if what == "killed":
        _retrain(model, directory, strategy)


def _retrain(served, directory: pathlib.Path, strategy) -> None:
    """Begins with what was trained, and may change little of it."""
    x = np.stack([x for x, _ in cases.numbered().as_numpy_iterator()])
    budget = tfdistill.callbacks.ChurnBudget(0.02, held_out=x, every_steps=2)
    _, logs, _ = cases.train(
        dataclasses.replace(CASE, seed=6, weight=budget),
        directory / "retrained",
        strategy=strategy,
        teachers=tfdistill.teachers.FixedTeacher(served.student),
        warm_start=directory / "backup",
    )
    worker = tfdistill.Cluster.from_env().task_index
    path = directory / f"retrained_{worker}.json"
    path.write_text(json.dumps([budget.churn, budget.weight, logs.batches()]))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
