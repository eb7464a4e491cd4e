"""Groups with parameter servers as real processes: who dies, who goes on."""

import functools
import json
import os
import signal

import pytest

from tests.cases import free_ports
from tests.cases import tasks
from tests.cases import waits
from tests.programs import closure as program
from tests.programs import commands
from tfdistill.launcher import local_cluster
from tfdistill.launcher import local_run

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.usefixtures("no_process_left"),
]
_until = functools.partial(waits.until, pause_secs=0.05)


def _rounds(directory):
    """The count after each round so far, and the processes that ran it."""
    path = directory / "progress"
    # The last line may be half written.
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [(int(count), pids) for count, *pids in map(str.split, lines)]


def _has_worked(directory, pid):
    return any(str(pid) in pids for _, pids in _rounds(directory))


def _topology(directory, num_workers, **fields):
    return local_cluster.LocalCluster(
        command=commands.of(program, directory),
        workdir=str(directory),
        workers_per_group=num_workers,
        ps_per_group=1,
        **fields,
    )


def _until_at_work(run, directory, *names):
    """Polls the run until these workers have run closures; their pids."""

    def at_work():
        pids = [run.pids.get(name) for name in names]
        return all(_has_worked(directory, pid) for pid in pids) and pids

    return tasks.poll_until(run, at_work)


@pytest.mark.deep
def test_a_chief_works_and_ends_without_a_worker_that_is_gone(tmp_path):
    topology = _topology(tmp_path, 2, worker_restarts=0)
    names = ["group_0_worker_0", "group_0_worker_1"]
    with local_run.LocalRun(topology) as run:
        _, lost = _until_at_work(run, tmp_path, *names)
        os.kill(lost, signal.SIGKILL)
        tasks.poll_until(
            run, lambda: run.result().groups[0].exit_codes[names[1]]
        )
        num_rounds = len(_rounds(tmp_path))
        _until(lambda: len(_rounds(tmp_path)) > num_rounds + 20)
        run.poll()
        assert not run.over
        (tmp_path / "stop").touch()
        result = tasks.end(run)
    (group,) = result.groups
    assert (result.exit_code, group.state) == (0, "done")
    assert str(lost) not in _rounds(tmp_path)[-1][1]


@pytest.fixture
def start(tmp_path):
    """Starts a task by hand, as on a cluster without our launcher."""
    free = free_ports.addresses(3)
    spec = {"chief": [free[0]], "worker": [free[1]], "ps": [free[2]]}
    with commands.starting(tmp_path) as starter:

        def act(task_type, **env):
            config = {"cluster": spec, "task": {"type": task_type, "index": 0}}
            env["TF_CONFIG"] = json.dumps(config)
            return starter(program, tmp_path, **env)

        yield act


@pytest.mark.deep
def test_servers_bear_an_impostor_and_follow_their_chief(tmp_path, start):
    chief, worker, ps = map(start, ("chief", "worker", "ps"))
    _until(lambda: _has_worked(tmp_path, worker.pid))
    for server in (worker, ps):
        _until(lambda server=server: "serves chief:0" in server.text())
    impostor = start("worker")
    assert impostor.wait() == 1
    said = impostor.text()
    assert "worker:0 cannot listen on 127.0.0.1:" in said
    assert "such as a second worker:0" in said
    num_rounds = len(_rounds(tmp_path))
    _until(lambda: len(_rounds(tmp_path)) > num_rounds + 5)
    assert chief.poll() is worker.poll() is ps.poll() is None
    chief.kill()
    for server in (worker, ps):
        assert server.wait() == 0
        assert ":0 ends: chief:0 at 127.0.0.1:" in server.text()


@pytest.mark.deep
def test_servers_wait_for_another_start_of_their_chief(tmp_path, start):
    env = {"TFDISTILL_CHIEF_RETURN_SECS": "60"}
    chief, worker, ps = (start(t, **env) for t in ("chief", "worker", "ps"))
    for server in (worker, ps):
        _until(lambda server=server: "serves chief:0" in server.text())
    _until(lambda: _has_worked(tmp_path, worker.pid))
    chief.kill()
    anew = "restarts and waits 60 s for chief:0 at 127.0.0.1:"
    for server in (worker, ps):
        _until(lambda server=server: anew in server.text())
    num_rounds = len(_rounds(tmp_path))
    chief = start("chief", **env)
    # From 0 on: nothing of what the first chief had placed there is left.
    _until(lambda: len(_rounds(tmp_path)) > num_rounds)
    assert _rounds(tmp_path)[num_rounds][0] == 8
    # They look once a second, and wait for a chief that they have not seen.
    for server in (worker, ps):
        _until(lambda server=server: server.text().count("serves") == 2)
    (tmp_path / "stop").touch()
    # With nothing left to do their program ends by itself.
    for process in (chief, worker, ps):
        assert process.wait() == 0
