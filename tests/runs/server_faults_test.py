"""Groups with parameter servers that lose a task while they train."""

import json
import os
import signal

import numpy as np
import pytest

import tfdistill
from tests.cases import tasks
from tests.programs import commands
from tests.programs import server_group_fault as program
from tfdistill.launcher import local_cluster
from tfdistill.launcher import local_run

pytestmark = [
    pytest.mark.deep,
    pytest.mark.multiprocess,
    pytest.mark.usefixtures("no_process_left"),
]


def _topology(directory, num_steps, **fields):
    return local_cluster.LocalCluster(
        command=commands.of(program, directory, num_steps),
        workdir=str(directory / "run"),
        **fields,
    )


def _runs(directory):
    lines = (directory / "runs.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def _newest_backup(directory):
    steps = tfdistill.Exchange(directory / "backup").steps(0)
    return max(steps, default=0)


def test_a_killed_worker_comes_back_with_its_teachers(tmp_path):
    num_steps = 400
    program.publish(tmp_path)
    topology = _topology(
        tmp_path, num_steps, workers_per_group=2, ps_per_group=1
    )
    with local_run.LocalRun(topology) as run:
        tasks.poll_until(run, (tmp_path / "started").exists)
        os.kill(run.pids["group_0_worker_1"], signal.SIGKILL)
        (tmp_path / "draft").write_text("[1]")
        (tmp_path / "draft").rename(tmp_path / "killed")
        result = tasks.end(run)
    (group,) = result.groups
    assert (result.exit_code, group.state) == (0, "done"), group
    assert group.restarts == {"group_0_worker_0": 0, "group_0_worker_1": 1}
    end = _runs(tmp_path)[-1]
    # It worked again, however soon; all steps count once, wherever they ran.
    assert len(end["workers"]) == num_steps // program.STEPS_PER_EXECUTION
    assert 1 in end["workers_since_kill"]
    assert end["step"] == num_steps
    per_epoch = num_steps // 2 * program.BATCH_SIZE
    assert end["history"]["count"] == [per_epoch, per_epoch]
    # The student predicts 0 and the teacher 2, on each worker at each time.
    np.testing.assert_allclose(end["distillation_losses"], 4.0, rtol=1e-5)
    assert end["history"]["distillation_weight"] == [1.0, 1.0]
    # Each id has one row, in which it is found.
    ids = end["table"]
    assert sorted(np.flatnonzero(ids["keys"])) == sorted(np.ravel(ids["found"]))
    assert len(np.unique(ids["found"])) == len(np.unique(program.IDS))
    assert np.max(ids["last"]) == num_steps - 1


def _lose(directory, topology, task):
    """Runs until there is a backup, then kills a task."""
    with local_run.LocalRun(topology) as run:
        tasks.poll_until(run, lambda: _newest_backup(directory))
        os.kill(run.pids[task], signal.SIGKILL)
        result = tasks.end(run)
    (group,) = result.groups
    assert (result.exit_code, group.state) == (137, "failed")
    assert group.failed_task == task
    assert group.reason == f"{task} was ended by signal 9 (SIGKILL)"
    return _newest_backup(directory)


def test_a_group_resumes_after_the_loss_of_a_ps(tmp_path):
    num_steps = 160
    topology = _topology(tmp_path, num_steps, ps_per_group=2)
    lost = _lose(tmp_path, topology, "group_0_ps_1")
    (tmp_path / "killed").write_text("[]")
    with local_run.LocalRun(topology) as run:
        result = tasks.end(run)
    assert result.exit_code == 0, result.groups
    assert 0 < lost < num_steps
    begins, end = _runs(tmp_path)[:-1], _runs(tmp_path)[-1]
    # A weight is the number of steps, so that it tells what was restored.
    for begin, step in zip(begins, [0, lost], strict=True):
        assert begin["event"] == "begin"
        assert (begin["step"], begin["weight"]) == (step, step)
    assert end["event"] == "end"
    assert (end["step"], end["weight"]) == (num_steps, num_steps)
    # Every id has got its row, most of them after uses on both sides of it.
    assert end["table"] == program.table(program.trained_alone(num_steps))
    # Epochs that were in progress count what was done of them before.
    per_epoch = num_steps // 2 * program.BATCH_SIZE
    num_epochs = 2 if lost < num_steps // 2 else 1
    assert end["history"]["count"] == [per_epoch] * num_epochs
