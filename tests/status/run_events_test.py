"""Tests of the log of events."""

import errno
import pathlib

from tfdistill.status import run_events


def test_a_full_disk_costs_lines_and_ends_nothing(tmp_path):
    log = run_events.EventLog(pathlib.Path("/dev/full"))
    log.add("start", group=0)
    assert log.error.errno == errno.ENOSPC
    path = tmp_path / run_events.NAME
    path.write_bytes(b'{"event": "st\n{"event": "end"}\n')
    assert [event["event"] for event in run_events.read(path)] == ["end"]
