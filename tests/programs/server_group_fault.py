"""A small training that outlives the loss of its tasks.

Usage: python -m tests.programs.server_group_fault DIR NUM_STEPS. Each step adds
1 to the student's weight; but with DIR/exchange/group_1 the student learns from
what lies there, at a rate of 0. DIR/started tells that training runs. It goes
slowly until DIR/killed names, as JSON, the workers that were killed, and these
are back. Adds a line to DIR/runs.jsonl at the start and at the end.

Ids get rows in the table at their 30th use: at different steps, most of them
some backups after the first, and in the teacher none.
"""

import json
import pathlib
import sys
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as codistillation_cases
from tests.programs import server_group_workers as counting
from tfdistill.parameter_server import worker

STEPS_PER_EXECUTION, BACKUP_STEPS, BATCH_SIZE = 2, 8, 4
TEACHER_STEP = 10
# Of an execution's batches, so that data that begin anew are the same.
IDS = np.array([[0, 0, 7, 2**50], [0, 0, 8, 2**50 + 1]])
WAIT_SECS = 0.5


class Notes(keras.callbacks.Callback):
    """Notes who did what, and waits for those that were killed."""

    def __init__(self, directory: pathlib.Path) -> None:
        super().__init__()
        self._directory = directory
        self._awaited: list | None = None
        self._lost_until = 0
        self._num_done = 0
        self.workers: list = []
        self.distillation_losses: list = []

    def on_train_begin(self, logs=None):
        result = worker.TrainFunction.result

        def noted(function: Any, vector: Any) -> Any:
            found = result(function, vector)
            self.workers.append(found.worker)
            return found

        worker.TrainFunction.result = noted
        if len(self.model.teachers):
            codistillation_cases.load(self.model, TEACHER_STEP)
        self.write({"event": "begin"})

    def on_train_batch_end(self, batch, logs=None):
        self._num_done += 1
        if "distillation_loss" in logs:
            self.distillation_losses.append(logs["distillation_loss"])
        if self._num_done == 4:
            (self._directory / "started").touch()
        killed = self._directory / "killed"
        if self._awaited is None and killed.exists():
            self._awaited = json.loads(killed.read_text())
            # Their last results may come in after their end: two executions
            # are in flight for each of two workers.
            self._lost_until = len(self.workers) + 4
        if self._is_waiting():
            time.sleep(WAIT_SECS)

    def _is_waiting(self) -> bool:
        if self._awaited is None:
            return True
        since = self.workers_since_kill()
        return any(worker not in since for worker in self._awaited)

    def workers_since_kill(self) -> list:
        """Returns who did what can only have been done by those there now."""
        return self.workers[self._lost_until :]

    def write(self, note: dict) -> None:
        kernel = self.model.student.get_layer("weight").kernel.numpy()
        step = int(self.model.optimizer.iterations.numpy())
        line = {"step": step, "weight": float(kernel[0, 0]), **note}
        with (self._directory / "runs.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def student() -> keras.Model:
    """Predicts `weight * x + table[id]`, both 0 at first."""
    return counting.student(
        tfdistill.layers.DynamicEmbedding(
            2048,
            1,
            admit_after=30,
            embeddings_initializer="zeros",
            name="table_of_ids",
        )
    )


def table(model: tfdistill.CodistillModel) -> dict[str, list]:
    """Returns all that a model holds of ids, and where it finds `IDS`."""
    layer = model.student.get_layer("table_of_ids")
    parts = {"rows": layer.shards, "keys": layer.ids.table.shards}
    for name in ("last", "count"):
        parts[name] = [own[name] for own in layer.ids.table.slots]
    return {
        "found": layer.rows_of(np.unique(IDS)[:, None]).tolist(),
        "unknown": layer.unknown.numpy().tolist(),
        **{
            name: np.concatenate([v.numpy() for v in part]).tolist()
            for name, part in parts.items()
        },
    }


def main(directory: pathlib.Path, num_steps: int) -> None:
    strategy = tfdistill.make_strategy()
    exchange = tfdistill.Exchange(directory / "exchange", key=None)
    learns = (directory / "exchange" / "group_1").exists()
    teachers = tfdistill.teachers.Peers(exchange, peers=[1])
    with strategy.scope():
        model = tfdistill.CodistillModel(
            student(), teachers=teachers if learns else None
        )
        model.compile(
            # The teacher's term must not move the weight.
            keras.optimizers.SGD(0.0 if learns else 1.0),
            counting.rewarded,
            metrics=[counting.Count(name="count")],
            steps_per_execution=STEPS_PER_EXECUTION,
            distillation_loss=tfdistill.losses.LogitsMeanSquaredError(
                from_logits=True
            )
            if learns
            else None,
            distillation_weight=1.0,
        )
    notes = Notes(directory)
    callbacks = [
        notes,
        tfdistill.callbacks.Backup(
            directory / "backup", every_steps=BACKUP_STEPS
        ),
    ]
    if learns:
        callbacks.append(codistillation_cases.never())
    history = model.fit(
        data().repeat(),
        steps_per_epoch=num_steps // 2,
        epochs=2,
        verbose=0,
        callbacks=callbacks,
    )
    notes.write(
        {
            "event": "end",
            "history": history.history,
            "workers": notes.workers,
            "workers_since_kill": notes.workers_since_kill(),
            "distillation_losses": notes.distillation_losses,
            "table": table(model),
        }
    )


def data() -> tf.data.Dataset:
    """A batch for each row of `IDS`, each feature 1."""
    return counting.examples(np.ones(IDS.size), IDS).batch(BATCH_SIZE)


def trained_alone(
    num_steps: int, rate: float = 1.0, callbacks: Any = ()
) -> tfdistill.CodistillModel:
    model = tfdistill.CodistillModel(student())
    model.compile(
        keras.optimizers.SGD(rate),
        counting.rewarded,
        steps_per_execution=STEPS_PER_EXECUTION,
    )
    model.fit(
        data().repeat(),
        steps_per_epoch=num_steps,
        verbose=0,
        shuffle=False,
        callbacks=list(callbacks),
    )
    return model


def publish(directory: pathlib.Path) -> None:
    """Publishes a teacher: the same student after a few steps."""
    exporter = tfdistill.callbacks.StudentExporter(
        tfdistill.Exchange(directory / "exchange"), every_steps=1000, group=1
    )
    trained_alone(TEACHER_STEP, rate=0.1, callbacks=[exporter])


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
