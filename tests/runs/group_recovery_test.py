"""A group of two real workers that is broken, and goes on from its backup."""

import json
import os
import signal

import pytest

from tests.cases import tasks
from tests.programs import commands
from tfdistill.launcher import files
from tfdistill.launcher import local_cluster
from tfdistill.launcher import local_run
from tfdistill.status import run_events

pytestmark = [
    pytest.mark.deep,
    pytest.mark.multiprocess,
    pytest.mark.usefixtures("no_process_left"),
]
NUM_STEPS = 120
CODE = f"""
import ctypes, json, pathlib, time
import keras, numpy as np, tensorflow as tf
import tfdistill
cluster = tfdistill.Cluster.from_env()
work = pathlib.Path(cluster.workdir)
name = f"worker_{{cluster.task_index}}"
strategy = tfdistill.make_strategy(cluster)
with strategy.scope():
    model = tfdistill.CodistillModel(
        keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    )
    model.compile("sgd", "mse")

class Steps(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if (work / f"{{name}}.hang").exists():
            (work / f"{{name}}.hang").unlink()
            ctypes.PyDLL(None).sleep(600)

    def on_train_batch_end(self, batch, logs=None):
        step = int(self.model.optimizer.iterations.numpy())
        with (work / f"{{name}}.steps").open("a") as file:
            print(step, file=file)
        time.sleep(0.05)

x = np.ones((32, 2), "float32")
model.fit(
    tf.data.Dataset.from_tensor_slices((x, x[:, :1])).repeat().batch(8),
    steps_per_epoch={NUM_STEPS},
    verbose=0,
    callbacks=[
        Steps(),
        tfdistill.callbacks.Backup(work / "backup", every_steps=10),
    ],
)
(work / f"{{name}}.json").write_text(json.dumps([
    int(model.optimizer.iterations.numpy()),
    [w.tolist() for w in model.student.get_weights()],
]))
"""


def test_a_group_comes_back_after_a_kill_and_a_hang(tmp_path):
    topology = local_cluster.LocalCluster(
        command=commands.of("-c", CODE),
        workdir=str(tmp_path),
        workers_per_group=2,
        max_restarts=2,
    )
    steps = tmp_path / "worker_0.steps"

    def reached(step):
        lines = steps.read_text().split() if steps.exists() else []
        return bool(lines) and int(lines[-1]) >= step

    def num_starts():
        events = run_events.read(files.events_path(topology))
        return sum(event["event"] == "start" for event in events)

    with local_run.LocalRun(topology) as run:
        tasks.poll_until(run, lambda: reached(30))
        os.kill(run.pids["group_0_worker_1"], signal.SIGKILL)
        tasks.poll_until(run, lambda: num_starts() == 4)
        steps.rename(tmp_path / "first.steps")
        tasks.poll_until(run, lambda: reached(60))
        (tmp_path / "worker_1.hang").touch()
        result = tasks.end(run)
    assert result.exit_code == 0, result.groups
    assert result.groups[0].group_restarts == 2
    ends = [
        json.loads((tmp_path / f"worker_{i}.json").read_text()) for i in (0, 1)
    ]
    assert [end[0] for end in ends] == [NUM_STEPS, NUM_STEPS]
    assert ends[0][1] == ends[1][1]
    # It went on from a backup, not from the beginning.
    assert int(steps.read_text().split()[0]) > 1
    events = run_events.read(files.events_path(topology))
    failed = [e for e in events if e["event"] == "failed"]
    assert [e["exit_code"] for e in failed] == [137, 75]
    assert failed[0]["task"] == "group_0_worker_1"
