"""Groups that fail, freeze and hang under the real launcher."""

import functools
import itertools
import json
import os
import pathlib
import signal

import pytest

from tests.cases import tasks
from tfdistill.cluster import signs
from tfdistill.launcher import local_cluster
from tfdistill.launcher import local_run
from tfdistill.launcher import watches

_topology = functools.partial(tasks.topology, max_restarts=3)
pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.usefixtures("no_process_left"),
]


def _events(topology, *kinds):
    path = topology.logs_dir / "events.jsonl"  # Made by the first event.
    lines = path.read_text().splitlines() if path.exists() else []
    events = [json.loads(line) for line in lines]
    return [e for e in events if not kinds or e["event"] in kinds]


def _steps(topology, name):
    """The steps that a task has made, in all of its attempts."""
    path = pathlib.Path(topology.workdir, f"{name}.done")
    return [int(n) for n in path.read_text().split()] if path.exists() else []


def test_a_killed_worker_brings_its_whole_group_back(tmp_path, capsys):
    code = """
connect()
print("address", json.dumps(CONFIG["cluster"]), flush=True)
train(50)
"""
    topology = _topology(tmp_path, code, num_groups=2, workers_per_group=2)
    pids = []
    with tasks.shown(topology) as run:
        for attempt, victim in enumerate(["worker_1", "worker_0"], start=1):
            name = f"group_0_{victim}"

            log = topology.logs_dir / f"{name}.log"

            def stepped(name=name, attempt=attempt, log=log):
                starts = _events(topology, "start")
                # Since the last kill, too: the attempt before was quicker.
                is_connected = log.read_text().count("address") == attempt
                steps = _steps(topology, name)
                return len(starts) == 2 + 2 * attempt and (
                    is_connected and len(steps) > 10 * attempt
                )

            tasks.poll_until(run, stepped)
            pids.append(run.pids)
            os.kill(pids[-1][name], signal.SIGKILL)
        result = tasks.end(run)
    assert result.exit_code == 0
    assert [g.state for g in result.groups] == ["done", "done"]
    assert [g.group_restarts for g in result.groups] == [2, 0]
    for name in ("group_0_worker_0", "group_0_worker_1"):
        assert _steps(topology, name)[-1] == 50
        assert pids[0][name] != pids[1][name]
        # All attempts' words are there, and each had ports of its own.
        log = (topology.logs_dir / f"{name}.log").read_text().splitlines()
        marks = [line for line in log if line.startswith("=====")]
        assert [mark[-26:] for mark in marks] == [
            "start 2 of the group =====",
            "start 3 of the group =====",
        ]
        assert len({line for line in log if line.startswith("address")}) == 3
    assert pids[0]["group_1_worker_0"] == pids[1]["group_1_worker_0"]
    failed = _events(topology, "failed")
    assert [e["task"] for e in failed] == [
        "group_0_worker_1",
        "group_0_worker_0",
    ]
    assert [e["exit_code"] for e in failed] == [137, 137]
    restarts = _events(topology, "restart")
    assert [(e["group"], e["delay_secs"]) for e in restarts] == [
        (0, 0.5),
        (0, 1.0),
    ]
    starts = _events(topology, "start")
    attempts = [e["attempt"] for e in starts if e["group"] == 0]
    assert attempts == [1, 1, 2, 2, 3, 3]
    assert len(_events(topology, "ready")) == 8
    assert _events(topology)[-1]["event"] == "end"
    out = capsys.readouterr().out
    assert "group 0: restart 1 of 3 in 0.5 s" in out
    assert "group 0: restart 2 of 3 in 1 s" in out


def test_the_other_groups_end_only_when_one_has_failed_for_good(tmp_path):
    code = """
connect()
if GROUP == 1:
    sys.exit(3)
time.sleep(600)
"""
    topology = _topology(tmp_path, code, num_groups=2, max_restarts=1)
    result = tasks.run(topology)
    assert result.exit_code == 3
    assert [g.state for g in result.groups] == ["stopped", "failed"]
    (stopped,) = _events(topology, "stopped")
    restart, failed = _events(topology, "restart")[0], _events(topology)[-1]
    assert restart["monotonic"] < stopped["monotonic"] < failed["monotonic"]


def test_a_missing_task_is_named_and_waited_for_again(
    tmp_path, capsys, monkeypatch
):
    code = """
if INDEX == 1 and not (WORKDIR / "x").exists():
    (WORKDIR / "x").touch()
    time.sleep(600)
signs.announce(signs.STARTING)
while not (WORKDIR / "second").exists():
    if INDEX == 1:
        (WORKDIR / "second").touch()
    time.sleep(0.02)
signs.announce(signs.READY)
"""
    topology = _topology(
        tmp_path, code, workers_per_group=2, start_timeout_secs=2
    )
    ready_path = topology.logs_dir / "ready" / "0_worker_0"
    absent, ticks = pathlib.Path(topology.workdir, "x"), itertools.count()

    def clock():
        """Runs only while one task waits for the absent one, the first time."""
        waits = absent.exists() and signs.found(ready_path, signs.STARTING)
        return next(ticks) if waits and not _events(topology, "late") else 0

    watch = functools.partial(watches.TaskWatch, clock=clock)
    monkeypatch.setattr(watches, "TaskWatch", watch)
    result = tasks.run(topology)
    assert result.exit_code == 0
    assert result.groups[0].group_restarts == 1
    (late,) = _events(topology, "late")
    assert "group_0_worker_1 did not start" in late["reason"]
    assert "group_0_worker_0" not in late["reason"]
    (failed,) = _events(topology, "failed")
    assert (failed["task"], failed["exit_code"]) == (None, 75)


def test_a_group_starts_on_other_ports_if_one_is_taken(
    tmp_path, capsys, monkeypatch
):
    code = """
host, port = CONFIG["cluster"]["worker"][INDEX].split(":")
signs.announce(signs.STARTING)
try:
    socket.create_server((host, int(port)))
except OSError:
    signs.announce(signs.PORT_TAKEN)
    raise
signs.announce(signs.READY)
"""
    squatters = []
    reserve = local_cluster.reserve_ports

    def first_taken(num_ports):
        holders = reserve(num_ports)
        if not squatters:
            holders[1].listen()
            squatters.append(holders[1])
        return holders

    monkeypatch.setattr(local_cluster, "reserve_ports", first_taken)
    topology = _topology(tmp_path, code, workers_per_group=2, max_restarts=0)
    result = tasks.run(topology)
    assert result.exit_code == 0, result.groups
    assert result.groups[0].group_restarts == 0
    assert "one of its ports was taken" in capsys.readouterr().out
    assert _events(topology, "restart")[0]["restart"] == 0


def test_a_task_that_hangs_with_pythons_lock_is_found(tmp_path, capsys):
    topology = _topology(
        tmp_path,
        "connect()\ntrain(50)\nsigns.own().say(signs.IDLE)",
        num_groups=2,
        stuck_secs=2.0,
    )
    with local_run.LocalRun(topology) as run:
        name = "group_0_worker_0"
        tasks.poll_until(run, lambda: len(_steps(topology, name)) > 10)
        pathlib.Path(topology.workdir, "group_0_worker_0.hang").touch()
        result = tasks.end(run)
    assert result.exit_code == 0
    assert [g.group_restarts for g in result.groups] == [1, 0]
    (stuck,) = _events(topology, "stuck")
    assert (stuck["group"], stuck["phase"]) == (0, "step")
    assert stuck["silent_secs"] >= 2.0
    (failed,) = _events(topology, "failed")
    assert failed["exit_code"] == 75
    assert "group_0_worker_0 " in failed["reason"]
    killed = [e for e in _events(topology, "exit") if e["exit_code"]]
    assert [e["task"] for e in killed] == ["group_0_worker_0"]
    assert _steps(topology, "group_0_worker_0")[-1] == 50


def test_a_stuck_worker_of_a_chief_is_started_again_alone(tmp_path):
    code = """
connect()
if TYPE == "chief":
    while not (WORKDIR / "back").exists():
        signs.own().say(signs.STEP)
        time.sleep(0.1)
    sys.exit(0)
if TYPE == "worker" and (WORKDIR / "stopped").exists():
    (WORKDIR / "back").touch()
while True:
    if TYPE != "worker" or not (WORKDIR / "stopped").exists():
        signs.own().say(signs.SERVING)
    time.sleep(0.1)
"""
    topology = _topology(tmp_path, code, ps_per_group=1, stuck_secs=2.0)
    with local_run.LocalRun(topology) as run:
        tasks.poll_until(run, lambda: len(_events(topology, "ready")) == 3)
        ready_path = topology.logs_dir / "ready" / "0_worker_0"
        tasks.poll_until(
            run, lambda: signs.read_progress(ready_path).count > 10
        )
        pathlib.Path(topology.workdir, "stopped").touch()
        result = tasks.end(run)
    assert result.exit_code == 0
    (group,) = result.groups
    assert group.group_restarts == 0
    assert group.restarts == {"group_0_worker_0": 1}
    (stuck,) = _events(topology, "stuck")
    assert stuck["task"] == "group_0_worker_0"
