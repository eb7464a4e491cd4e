"""Groups that run on a real Slurm: two nodes of its own on this machine."""

import functools
import json
import os
import pathlib
import sys

import psutil
import pytest

from launch import slurm as slurm_lib
from tests.cases import slurm_nodes
from tests.cases import waits
from tfdistill.recipes import outputs

pytestmark = [
    pytest.mark.deep,
    pytest.mark.multiprocess,
    pytest.mark.usefixtures("no_process_left"),
]
_until = functools.partial(waits.until, pause_secs=0.05)
# Enough for a fast machine to be caught in the middle.
NUM_STEPS = 500
ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def slurm(monkeypatch):
    if reason := slurm_nodes.missing():
        pytest.skip(reason)
    with slurm_nodes.running() as found:
        for name in ("PATH", "SLURM_CONF"):
            monkeypatch.setenv(name, found.env[name])
        yield found


def _submit(capsys, workdir, *argv):
    """Submits two groups on all nodes; returns the job's number."""
    options = [f"--workdir={workdir}", "--num_groups=2", f"--chdir={ROOT}"]
    options.append(f"--sbatch=--nodes={len(slurm_nodes.node_names())}")
    assert slurm_lib.main([*options, "--submit", *argv]) == 0
    return capsys.readouterr().out.strip()


def _step(workdir, group):
    """The newest step that a group tells of, and a backup is likely for."""
    try:
        return outputs.read_records(workdir / f"group_{group}")[-1]["step"]
    except (OSError, IndexError, KeyError, ValueError):
        return 0  # Nothing yet, or half a line.


def _tasks(workdir):
    """The commands that run, by group and index: process and environment."""
    found = {}
    for process in psutil.process_iter():
        try:
            env, words = process.environ(), process.cmdline()
        except psutil.Error:
            continue
        # Not the parent that waits for a command.
        if (
            env.get("TFDISTILL_WORKDIR") == str(workdir)
            and "tfdistill.slurm.task" not in words
        ):
            index = json.loads(env["TF_CONFIG"])["task"]["index"]
            found[int(env["TFDISTILL_GROUP"]), index] = process, env
    return found


def _check_identities(tasks):
    addresses = []
    for (group, index), (_, env) in tasks.items():
        config = json.loads(env["TF_CONFIG"])
        assert config["task"] == {"type": "worker", "index": index}
        assert set(config["cluster"]) == {"worker"}
        hosts = [a.partition(":")[0] for a in config["cluster"]["worker"]]
        names = slurm_nodes.node_names()
        assert sorted(hosts) == sorted(names * (2 // len(names)))
        assert env["TFDISTILL_NUM_GROUPS"] == "2"
        assert env["TFDISTILL_GROUP"] == str(group)
        addresses.append(config["cluster"]["worker"][index])
    ports = {address.partition(":")[2] for address in addresses}
    assert len(ports) == 4, addresses


def _describe(workdir):
    logs = sorted((workdir / "logs").glob("*.log"))
    return "\n".join(f"{p.name}\n{p.read_text()[-3000:]}" for p in logs)


def test_groups_learn_from_each_other_and_come_back(slurm, tmp_path, capsys):
    workdir = tmp_path / "my run"
    overrides = (
        f"num_steps={NUM_STEPS}",
        f"evaluate_every_steps={NUM_STEPS // 2}",
        "exchange.every_steps=50",
        "exchange.refresh_every_steps=20",
        "backup_every_steps=20",
        # Each group's first version is one to learn from: while one comes back,
        # the other may end, whose later versions are too late or missing.
        "burn_in_steps=20",
        "start_together_secs=600",
    )
    job = _submit(
        capsys,
        workdir,
        "--workers_per_group=2",
        "--recipe=digits",
        *(f"--override={override}" for override in overrides),
    )
    _until(lambda: min(_step(workdir, g) for g in (0, 1)) >= 60, "60 steps")
    tasks = _tasks(workdir)
    assert set(tasks) == {(g, i) for g in (0, 1) for i in (0, 1)}
    _check_identities(tasks)

    # One worker of a group dies: the whole group is started again where it is,
    # and the other group goes on meanwhile.
    before = _step(workdir, 1)
    tasks[0, 1][0].kill()
    _until(lambda: _step(workdir, 1) >= before + 20, "20 steps of the other")
    # What Slurm sends by itself before the time limit.
    slurm.run("scancel", "--batch", "--signal=USR1", f"{job}_1")
    log = workdir / "logs" / "slurm_group_0.log"
    _until(
        lambda: (
            "group_0_worker_1 ended with 137; restart 1 of 3" in log.read_text()
        ),
        "the restart",
    )
    _until(lambda: not tasks[0, 0][0].is_running(), "its end")
    for group in (0, 1):
        slurm.wait(f"{job}_{group}", "COMPLETED", "FAILED")
        assert slurm.job(f"{job}_{group}")["JobState"] == "COMPLETED", (
            _describe(workdir)
        )
    assert slurm.job(f"{job}_0")["Restarts"] == "0"
    assert slurm.job(f"{job}_1")["Restarts"] == "1"
    results = outputs.read_results(workdir)
    for result in results["groups"]:
        assert result["steps"] == NUM_STEPS
        assert result["workers"] == 2
        assert result["resumed_step"] >= 20, "it did not go on from a backup"
        records = outputs.read_records(workdir / f"group_{result['group']}")
        versions = [
            teacher["step"]
            for record in records
            for teacher in record.get("teachers", [])
        ]
        assert max(filter(None, versions)) > 0, "it never had a teacher"
    assert 0 < results["agreement"]["mean_distance"] < 0.5


TASK = """
import os, signal, sys, time
def end(number, frame):
    time.sleep(0.2)
    os._exit(75)
signal.signal(signal.SIGTERM, end)
group = os.environ["TFDISTILL_GROUP"]
print("node", os.environ["SLURMD_NODENAME"])
print("gpu", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
open(os.environ["TFDISTILL_READY_FILE"], "w").close()
if group == "0" and os.environ["SLURM_PROCID"] == "1":
    sys.exit(65)
time.sleep(600)
"""


def test_gpus_are_shared_out_and_wrong_data_and_cancelling_are_final(
    slurm, tmp_path, capsys
):
    workdir = tmp_path / "run"
    gpus = int(slurm_nodes.has_gpus())
    job = _submit(
        capsys,
        workdir,
        "--workers_per_group=3",
        f"--gpus_per_worker={gpus}",
        "--",
        *[sys.executable, "-c", TASK],
    )
    slurm.wait(f"{job}_0", "FAILED")
    # srun itself returns the code of those that were ended in consequence.
    assert slurm.job(f"{job}_0")["ExitCode"] == "65:0"
    said = (workdir / "logs" / "slurm_group_0.log").read_text()
    assert "exit code 65 means wrong data" in said
    assert "last 3 lines of" in said

    ready = [workdir / "logs" / "ready" / f"1_worker_{i}" for i in range(3)]
    _until(lambda: all(path.exists() for path in ready), "three tasks")
    logs = [workdir / "logs" / f"group_1_worker_{i}.log" for i in range(3)]
    lines = [log.read_text().splitlines()[1:] for log in logs]
    if gpus:
        assert all(gpu[4:].isdigit() for _, gpu in lines), lines
        assert len(set(map(tuple, lines))) == 3, "two tasks share a GPU"
    slurm.run("scancel", f"{job}_1")
    slurm.wait(f"{job}_1", "CANCELLED")
    said = (workdir / "logs" / "slurm_group_1.log").read_text()
    assert "so it is left to Slurm" in said
    assert slurm.job(f"{job}_1")["Restarts"] == "0"
    key = workdir / "exchange.key"
    assert os.stat(key).st_mode & 0o777 == 0o600
