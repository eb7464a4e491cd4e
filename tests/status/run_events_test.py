"""Tests of the log of events."""

import errno
import pathlib
import time

from tfdistill.status import run_events


def test_events_are_read_back_and_half_a_line_is_not(tmp_path):
    path = tmp_path / run_events.NAME
    before = time.monotonic()
    log = run_events.EventLog(path)
    log.add("exit", group=1, task="group_1_worker_0", attempt=2, exit_code=-9)
    log.add("end", exit_code=0)
    with path.open("ab") as file:
        file.write(b'{"event": "sta')
    first, last = run_events.read(path)
    assert first.pop("time") <= last["time"] <= time.time()
    assert before <= first.pop("monotonic") <= last["monotonic"]
    assert first == {
        "event": "exit",
        "group": 1,
        "task": "group_1_worker_0",
        "attempt": 2,
        "exit_code": -9,
    }
    assert (last["group"], last["task"]) == (None, None)


def test_a_full_disk_costs_lines_and_ends_nothing(tmp_path):
    log = run_events.EventLog(pathlib.Path("/dev/full"))
    log.add("start", group=0)
    assert log.error.errno == errno.ENOSPC
    path = tmp_path / run_events.NAME
    path.write_bytes(b'{"event": "st\n{"event": "end"}\n')
    assert [event["event"] for event in run_events.read(path)] == ["end"]
