"""All commands of the wheel, in an empty directory, on a user's own files."""

import json
import os
import signal
import subprocess

import pytest

from tests.cases import wheels
from tfdistill.commands import main

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.timeout_secs(300),
    pytest.mark.usefixtures("no_process_left"),
]
_WORKLOAD = """
import keras
import numpy as np
import tfdistill


def workload(num_steps: int = 60):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(400, 4)).astype("float32")
    y = (x.sum(axis=1) > 0).astype("int64")
    return tfdistill.Workload(
        model=lambda: keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(2)]
        ),
        data=((x[:300], y[:300]), (x[300:], y[300:])),
        batch_size=20,
        num_steps=num_steps,
        evaluate_every_steps=20,
        optimizer=lambda: keras.optimizers.SGD(0.1),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        distillation_weight=tfdistill.schedules.BurnIn(steps=10),
        every_steps=10,
        refresh_every_steps=5,
        start_together_secs=60.0,
    )
"""
_SCRIPT = """
import sys
import my_workload
import tfdistill

strategy = tfdistill.make_strategy()
made = my_workload.workload()
with strategy.scope():
    model = tfdistill.CodistillModel(
        made.model(), teachers=tfdistill.teachers.Peers()
    )
    model.compile(
        "sgd",
        made.loss,
        distillation_loss=tfdistill.losses.SoftTargetCrossEntropy(),
    )
(x, y), held_out = made.data
model.fit(x, y, epochs=int(sys.argv[1]), validation_data=held_out, verbose=0,
          callbacks=tfdistill.callbacks.defaults(every_steps=5))
"""


@pytest.fixture(scope="module")
def tfdistill(tmp_path_factory):
    """Calls the command in an empty directory that has two files of a user."""
    wheel = wheels.build(tmp_path_factory.mktemp("wheel"))
    installed = wheels.install(wheel, tmp_path_factory.mktemp("installed"))
    here = tmp_path_factory.mktemp("empty")
    (here / "my_workload.py").write_text(_WORKLOAD)
    (here / "my_train.py").write_text(_SCRIPT)

    def start(*arguments: str) -> subprocess.Popen:
        return subprocess.Popen(
            [str(installed / "bin" / "tfdistill"), *arguments],
            cwd=here,
            env={**os.environ, "PYTHONPATH": str(installed)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def call(*arguments: str) -> str:
        process = start(*arguments)
        try:
            out, error = process.communicate(timeout=120)
        finally:
            process.kill()
        assert process.returncode == 0, out + error
        return out

    call.start, call.here = start, here
    return call


def test_the_wheel_alone_runs_every_command_on_a_users_own_files(tfdistill):
    here = tfdistill.here
    tried = {"run": tfdistill("run", "--num-groups=2", "my_train.py", "2")}
    tried["status"] = tfdistill("status", "runs/last")
    assert tried["status"].count("done") >= 2
    tried["doctor"] = tfdistill("doctor", "--workdir=runs/last")
    assert "0 failed" in tried["doctor"]

    tfdistill("run", "--num_groups=2", "--recipe=my_workload.py")
    results = json.loads((here / "runs" / "last" / "results.json").read_text())
    assert [group["steps"] for group in results["groups"]] == [60, 60]
    assert sorted(os.listdir(here / "runs")) == ["1", "2", "last"]

    tried["promote"] = tfdistill("promote", "runs/last", "--to=served")
    tried["label"] = tfdistill(
        *("label", "--teacher=served/60", "--recipe=my_workload.py"),
        *("--output=labels", "--num-steps=3", "--trust-graph"),
    )
    assert "60 examples" in tried["label"]
    tried["compare"] = tfdistill(
        *(
            "compare",
            "--recipe=my_workload.py",
            "--methods=independent,codistill",
        ),
        *("--trials=2", "--workdir=compared"),
    )
    assert (here / "compared" / "report.md").exists()

    process = tfdistill.start(
        "teach", "--exchange=runs/last/exchange", "--port=0"
    )
    try:
        tried["teach"] = process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    finally:
        process.kill()
    assert json.loads(tried["teach"])["port"] > 0
    assert process.returncode == 0

    groups = ("--num-groups=2", "--workdir=/shared/run", "my_train.py")
    shared = ("--num-groups=2", f"--workdir={here / 'slurm'}", "my_train.py")
    tried["slurm"] = tfdistill("slurm", *shared)
    assert "#SBATCH --array=0-1" in tried["slurm"]
    tried["kubernetes"] = tfdistill(
        *("kubernetes", "--name=run1", "--image=me/image"),
        *("--volume-claim=runs", *groups),
    )
    assert "my_train.py" in tried["kubernetes"]
    (here / "daily.py").write_text("def workload(spans=()):\n    ...\n")
    tfdistill("line", "init", "clicks", "daily.py")
    tried["line"] = tfdistill("line", "status", "clicks")
    assert "Nothing is promoted" in tried["line"]
    assert set(tried) == set(main.COMMANDS)
