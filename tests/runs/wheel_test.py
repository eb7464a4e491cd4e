"""All commands of the wheel, in an empty directory, on a user's own files."""

import json
import os
import signal
import subprocess

import pytest

from tests.cases import wheels
from tfdistill.commands import main

pytestmark = [
    pytest.mark.deep,
    pytest.mark.multiprocess,
    pytest.mark.usefixtures("no_process_left"),
]
# A busy machine imports TensorFlow for more than a minute.
_DOCTOR = ("--limit-secs=600",)
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


class _Installed:
    """Calls the command in an empty directory that has two files of a user."""

    def __init__(self, program, here, *, python_path):
        self._program, self.here = str(program), here
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        self._env = env | python_path
        (here / "my_workload.py").write_text(_WORKLOAD)
        (here / "my_train.py").write_text(_SCRIPT)

    def start(self, *arguments: str) -> subprocess.Popen:
        return subprocess.Popen(
            [self._program, *arguments],
            cwd=self.here,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *arguments: str, exit_code: int = 0) -> str:
        """Returns what it prints, or its error if it is to fail."""
        process = self.start(*arguments)
        try:
            out, error = process.communicate()
        finally:
            process.kill()
        assert process.returncode == exit_code, out + error
        return error if exit_code else out


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return wheels.build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def tfdistill(wheel, tmp_path_factory):
    """The wheel, beside all that tests need."""
    installed = wheels.install(wheel, tmp_path_factory.mktemp("installed"))
    return _Installed(
        installed / "bin" / "tfdistill",
        tmp_path_factory.mktemp("empty"),
        python_path={"PYTHONPATH": str(installed)},
    )


@pytest.fixture(scope="module")
def tried(tfdistill):
    """What commands have printed, by name: a run, and a look at it."""
    recipe = ("--recipe=my_workload.py", "--override=num_steps=40")
    found = {"run": tfdistill("run", "--num-groups=2", *recipe)}
    found["status"] = tfdistill("status", "last_run")
    found["doctor"] = tfdistill("doctor", "--workdir=last_run", *_DOCTOR)
    return found


def test_without_extras_two_groups_teach_each_other(wheel, tmp_path_factory):
    programs = wheels.bare(wheel, tmp_path_factory.mktemp("bare"))
    here = tmp_path_factory.mktemp("empty")
    bare = _Installed(programs / "tfdistill", here, python_path={})
    extras = "fsspec matplotlib pandas scipy sklearn tensorflow_serving yaml"
    look = "import importlib.util as u, sys; print(*map(u.find_spec, sys.argv))"
    found = wheels.run(
        *(str(programs / "python"), "-Ic", look, *extras.split()), cwd=here
    )
    assert set(found.split()) == {"None"}

    bare("run", "--num-groups=2", "my_train.py", "2")
    assert bare("status", "last_run").count("done") >= 2
    assert "0 failed" in bare("doctor", "--workdir=last_run", *_DOCTOR)
    recipe = ("--recipe=my_workload.py", "--override=num_steps=2000")
    bare("run", "--num-groups=2", *recipe)
    results = json.loads((here / "last_run" / "results.json").read_text())
    for group in results["groups"]:
        assert group["steps"] == 2000
        assert group["teachers"][0]["swaps"] > 0
    for command, package, extra in (
        (["compare", "my_workload.py"], "matplotlib", "compare"),
        (["teach", "--exchange=x"], "tensorflow_serving", "teach"),
        (
            ["kubernetes", "--name=a", "--image=b", "--workdir=/c", "d.py"],
            *("yaml", "kubernetes"),
        ),
    ):
        assert bare(*command, exit_code=2).endswith(
            f"tfdistill {command[0]} needs {package}: "
            f'pip install "tfdistill[{extra}]"\n'
        )


def test_the_wheel_alone_trains_two_groups_by_a_users_own_file(
    tfdistill, tried
):
    workdir = tfdistill.here / "last_run"
    results = json.loads((workdir / "results.json").read_text())
    for group in results["groups"]:
        assert group["steps"] == 40 and len(group["teachers"]) == 1
    config = json.loads((workdir / "config.json").read_text())
    assert config["recipe"] == str(tfdistill.here / "my_workload.py")
    assert config["arguments"]["num_steps"] == 40
    assert tried["status"].count("done") >= 2
    assert "0 failed" in tried["doctor"]


def test_the_wheel_alone_runs_every_command(tfdistill, tried):
    here = tfdistill.here
    tfdistill("run", "--num-groups=2", "my_train.py", "2")
    assert sorted(os.listdir(here / "runs")) == ["1", "2"]
    tried["promote"] = tfdistill("promote", "runs/1", "--to=served")
    tried["label"] = tfdistill(
        *("label", "--teacher=served/40", "--recipe=my_workload.py"),
        *("--output=labels", "--num-steps=3", "--trust-graph"),
    )
    assert "60 examples" in tried["label"]
    tried["compare"] = tfdistill(
        *("compare", "--recipe=my_workload.py", "--trials=2"),
        *("--methods=independent,codistill", "--workdir=compared"),
    )
    assert (here / "compared" / "report.md").exists()

    process = tfdistill.start("teach", "--exchange=runs/1/exchange", "--port=0")
    try:
        tried["teach"] = process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        process.communicate()
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
