"""Tests of what is made of a run's files, whatever they hold."""

import fcntl
import json
import os
import socket

import pytest

from tests.cases import runs as cases
from tfdistill.status import observed_run
from tfdistill.status import run_events

_NOW = cases.NOW
_JUST = _NOW - 1


def _look(directory, **options):
    for path in directory.rglob("*"):
        # Files are as old as their lines say, not as this test.
        os.utime(path, (0.0, 0.0))
    run = observed_run.ObservedRun(directory, clock=lambda: _NOW, **options)
    return run.look()


def _states(seen):
    return [status.state for status in seen.groups]


_EVENTS = {
    "starting": [("start", 0, 9, {})],
    "running": [("start", 0, 9, {}), ("ready", 0, 5, {})],
    "done": [("start", 0, 9, {}), ("done", 0, 5, {})],
    "stopped": [("start", 0, 9, {}), ("stopped", 0, 5, {"reason": "x"})],
    "failed": [("start", 0, 9, {}), ("failed", 0, 5, {"reason": "x"})],
    "restarting": [
        ("start", 0, 9, {}),
        ("failed", 0, 5, {"reason": "x"}),
        ("restart", 0, 5, {"restart": 1}),
    ],
}


@pytest.mark.parametrize("state", list(_EVENTS))
def test_states_that_a_launcher_tells(tmp_path, state):
    cases.events(tmp_path, *_EVENTS[state])
    (status,) = _look(tmp_path).groups
    assert status.state == state
    assert status.num_restarts == (state == "restarting")
    assert status.last_error == (
        "x" if state in ("failed", "restarting") else ""
    )


@pytest.mark.parametrize("here", [True, False])
def test_a_launcher_that_was_killed_is_seen_at_once(tmp_path, here):
    cases.events(tmp_path, *_EVENTS["running"])
    cases.metrics(tmp_path, 0, cases.line(50, _NOW - 2))
    host = socket.gethostname() if here else "elsewhere"
    (tmp_path / "launch.json").write_text(json.dumps({"host": host}))
    with open(tmp_path / "logs" / "launcher.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert _states(_look(tmp_path)) == ["running"]
    seen = _look(tmp_path)  # The kernel has freed the lock.
    assert _states(seen) == ["failed" if here else "running"]
    assert seen.over == here
    assert ("launcher was killed" in seen.groups[0].last_error) == here


def test_a_restarted_group_runs_by_its_own_lines_only(tmp_path):
    cases.metrics(tmp_path, 0, cases.line(50, _NOW - 20))
    cases.events(tmp_path, *_EVENTS["restarting"])
    cases.events(tmp_path, ("start", 0, 4, {"attempt": 2}))
    assert _states(_look(tmp_path)) == ["starting"]
    cases.metrics(tmp_path, 0, cases.line(40, _NOW - 2))
    seen = _look(tmp_path)
    assert _states(seen) == ["running"]
    assert seen.groups[0].num_restarts == 1
    assert not seen.over


def test_groups_with_launchers_of_their_own(tmp_path):
    """As under Slurm, where a group is a job, which may be requeued."""
    directory = tmp_path / "logs"
    for group, found in ((0, "failed"), (1, "stopped")):
        events = [("start", group, 9, {}), (found, group, 5, {"reason": "x"})]
        path = cases.events(tmp_path, *events)
        path.rename(run_events.group_path(directory, group))
    assert _states(_look(tmp_path)) == ["failed", "stopped"]
    path = cases.events(tmp_path, ("start", 1, 2, {}))
    with run_events.group_path(directory, 1).open("a") as file:
        file.write(path.read_text())
    path.unlink()
    assert _states(_look(tmp_path)) == ["failed", "starting"]


def test_without_a_launcher_the_lines_tell(tmp_path):
    cases.metrics(tmp_path, 0, cases.line(5, _NOW - 100), cases.line(6, _JUST))
    cases.metrics(tmp_path, 1, cases.line(5, _NOW - 100))
    cases.metrics(tmp_path, 2, cases.line(9, _NOW - 900, event="end"))
    cases.metrics(tmp_path, 3, cases.line(9, _JUST, event="epoch_end"))
    seen = _look(tmp_path)
    assert _states(seen) == ["running", "silent", "done", "running"]
    assert seen.groups[1].silent_secs == 100
    assert _states(_look(tmp_path, silent_secs=200))[1] == "running"


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe"])
def test_damaged_files_are_told_or_passed_over(tmp_path, content):
    logs = tmp_path / "logs"
    logs.mkdir()
    (tmp_path / "group_0").mkdir()
    for path in (
        tmp_path / "launch.json",
        tmp_path / "group_0" / "metrics.jsonl",
        logs / "events.jsonl",
        logs / "group_0_worker_0.log",
    ):
        path.write_bytes(content)
    seen = _look(tmp_path)
    assert _states(seen) == ["starting"]
    assert any("launch.json" in problem for problem in seen.problems)


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(observed_run.NoRunError, match="contains no run"):
        observed_run.ObservedRun(tmp_path)
    (tmp_path / "file").touch()
    for name in ("absent", "file"):
        with pytest.raises(
            observed_run.NoRunError, match=f"{name} contains no run"
        ):
            observed_run.ObservedRun(tmp_path / name)


def test_errors_in_logs_are_found_where_no_event_tells_them(tmp_path):
    cases.metrics(tmp_path, 0, cases.line(5, _NOW - 100))
    log = tmp_path / "logs" / "group_0_worker_0.log"
    log.parent.mkdir()
    log.write_text(
        "E0000 cuda_executor: error: no device\n"
        "Traceback (most recent call last):\n"
        "  File 'x.py', line 1\n"
        "keras.errors.BadError: it \x1b[31mbroke\n"
    )
    (status,) = _look(tmp_path).groups
    assert status.state == "silent"
    assert status.last_error == (
        "keras.errors.BadError: it broke (group_0_worker_0.log)"
    )
    with log.open("a") as file:
        file.write("===== 2026-01-01 00:00:00: start 2 of the group =====\n")
    assert _look(tmp_path).groups[0].last_error == ""
