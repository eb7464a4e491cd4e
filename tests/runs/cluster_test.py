"""Groups of real workers, through the real launcher.

Here stand the invariants of the design that need processes: workers of a
group use one version (3), groups fail alone (8), every process ends (11).
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from tests.programs import codistill as codistill_program
from tests.programs import commands
from tfdistill.launcher import local_cluster
from tfdistill.launcher import local_run

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.timeout_secs(300),
]
PROGRAM = pathlib.Path(codistill_program.__file__)
NUM_STEPS = 120


def _topology(directory, num_steps, **fields):
    return local_cluster.LocalCluster(
        command=commands.of(codistill_program, num_steps, 0.05),
        workdir=str(directory),
        num_groups=2,
        **fields,
    )


def _reached(directory, group, step):
    path = pathlib.Path(directory) / f"group_{group}" / "metrics.jsonl"
    if not path.exists():
        return False
    # The last line may be half written.
    lines = path.read_text().split("\n")[:-1]
    return any(json.loads(line)["step"] >= step for line in lines)


def _wait_for_step(directory, group, step, *, limit_secs=200.0):
    deadline = time.monotonic() + limit_secs
    while not _reached(directory, group, step):
        if time.monotonic() > deadline:
            raise TimeoutError(f"group {group} did not reach step {step}.")
        time.sleep(0.1)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A whole run's directory and the notes of its four workers."""
    directory = tmp_path_factory.mktemp("codistilled")
    topology = _topology(directory, NUM_STEPS, workers_per_group=2)
    with local_run.LocalRun(topology) as run:
        result = run.wait(timeout_secs=240)
    assert result.exit_code == 0, result.groups
    notes = {
        (group, worker): json.loads(
            (directory / f"notes_{group}_{worker}.json").read_text()
        )
        for group in range(2)
        for worker in range(2)
    }
    return directory, notes


@pytest.mark.parametrize("group", [0, 1])
def test_03_workers_of_a_group_use_one_version_at_a_step(finished, group):
    _, notes = finished
    first, second = notes[group, 0], notes[group, 1]
    assert first["versions"] == second["versions"]
    in_use = [versions[0] for versions in first["versions"]]
    # Several refreshes really happened, forwards only.
    assert len(set(in_use) - {-1}) >= 2
    assert in_use == sorted(in_use)


@pytest.mark.parametrize("group", [0, 1])
def test_workers_of_a_group_end_with_the_same_student(finished, group):
    _, notes = finished
    for one, other in zip(
        notes[group, 0]["student"], notes[group, 1]["student"], strict=True
    ):
        np.testing.assert_array_equal(one, other)
    assert notes[group, 0]["steps"] == NUM_STEPS


@pytest.mark.parametrize("group", [0, 1])
def test_the_weight_is_in_force_after_burn_in_and_first_teacher(
    finished, group
):
    _, notes = finished
    found = notes[group, 0]
    # The version seen after step i is the one that step i + 1 obeys, unless
    # it is of the burn-in.
    versions = [[-1], *found["versions"][:-1]]
    expected = [
        float(step >= 10 and version[0] >= 10)
        for step, version in enumerate(versions)
    ]
    assert found["weights_in_force"] == expected
    assert sum(expected) > 0


@pytest.mark.usefixtures("no_process_left")
def test_08_groups_fail_alone(tmp_path):
    topology = _topology(tmp_path, 240, on_group_failure="continue")
    with local_run.LocalRun(topology) as run:
        killed = False
        deadline = time.monotonic() + 200
        while not run.over and time.monotonic() < deadline:
            run.poll(0.2)
            if not killed and _reached(tmp_path, 1, 40):
                os.kill(run.pids["group_1_worker_0"], signal.SIGKILL)
                killed = True
        result = run.wait(timeout_secs=10)
    assert killed
    assert result.exit_code != 0
    states = [group.state for group in result.groups]
    assert states == ["done", "failed"]
    survivor = json.loads((tmp_path / "notes_0_0.json").read_text())
    assert survivor["steps"] == 240
    # It kept the last teacher, which fades.
    assert survivor["versions"][-1] == survivor["versions"][-10]
    assert survivor["versions"][-1][0] >= 0
    weights = survivor["weights_in_force"]
    assert max(weights) == 1.0 and weights[-1] < 1.0


@pytest.mark.usefixtures("no_process_left")
def test_11_ctrl_c_ends_every_process(tmp_path):
    launcher = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tfdistill.launcher.command",
            "--workers_per_group=2",
            f"--workdir={tmp_path}",
            "--",
            sys.executable,
            str(PROGRAM),
            "100000",
            "0.01",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        _wait_for_step(tmp_path, 0, 5)
        tasks = psutil.Process(launcher.pid).children(recursive=True)
        assert len(tasks) >= 2
        launcher.send_signal(signal.SIGINT)
        output, _ = launcher.communicate(timeout=60)
    finally:
        launcher.kill()
        launcher.wait()
    assert launcher.returncode == 130, output
    _, alive = psutil.wait_procs(tasks, timeout=10)
    assert not alive
