"""Goodput, from made-up events whose answers are known."""

import json

import pytest

from tfdistill.status import goodput
from tfdistill.status import observed_run
from tfdistill.status import run_events
from tfdistill.status import tables


def _event(time, event, attempt=1, group=0, **details):
    return {
        **{"time": time, "event": event, "group": group, "attempt": attempt},
        **details,
    }


def _resumed(time, step, last_step, last_time):
    last = {"last_step": last_step, "last_time": last_time}
    return {"time": time, "event": "resumed", "step": step, **last}


def _mark(time, event, step=0):
    return {"time": time, "event": event, "step": step}


# Two tasks connect at 4 and 5; the first step is made at 10.
_START = [
    *[_event(0, "start", task="a"), _event(1, "start", task="b")],
    *[_event(4, "ready", task="a"), _event(5, "ready", task="b")],
    *[_resumed(6, 0, 0, None), _mark(10, "advancing", 1)],
]
# The last line is of 100; the fault is noticed at 103; processes start at 104,
# the last of two is connected at 106, the first step is made at 109, and the
# first new one at 115.
_FAULT = [
    *[_event(103, "exit", exit_code=-9), _event(103, "failed", reason="")],
    *[_event(103, "restart", restart=1), _event(104, "start", 2)],
    *[_event(104, "start", 2), _event(105, "ready", 2)],
    *[_event(106, "ready", 2), _resumed(107, 60, 90, 100)],
    *[_mark(109, "repeating", 61), _mark(115, "advancing", 91)],
]
_LOST = {"detection": 3, "waiting": 1, "start": 2, "restore": 3, "repeated": 6}


def _measured(*lines, until=200.0):
    found = goodput.measure([*lines], until=until)
    lost = {cause: secs for cause, secs in found.lost.items() if secs}
    return found.good, lost


def test_without_a_fault_only_the_start_is_lost():
    assert _measured(*_START) == (190, {"start": 10})


def test_each_cause_has_its_seconds():
    lost = {**_LOST, "start": 12}
    assert _measured(*_START, *_FAULT) == (90 + 85, lost)
    # They come from several files, one after another.
    assert _measured(*_FAULT[::-1], *_START) == (90 + 85, lost)


def test_a_fault_in_the_middle_of_a_recovery():
    # Killed while it repeats steps: its last line is of 112.
    again = [
        *[_event(113, "failed", 2), _event(115, "start", 3)],
        *[_event(116, "ready", 3), _resumed(118, 60, 70, 112)],
        *[_mark(119, "repeating", 61), _mark(130, "advancing", 91)],
    ]
    assert _measured(*_START, *_FAULT[:-1], *again) == (
        90 + 70,
        {
            "detection": 3 + 1,
            "waiting": 1 + 2,
            "start": 10 + 2 + 1,
            "restore": 3 + 3,
            "repeated": 3 + 11,
        },
    )
    # Killed before it trains: of its last step, the next attempt tells.
    early = [_event(107, "failed", 2), _event(110, "start", 3)]
    resumed = _resumed(120, 90, 90, 100)
    assert _measured(*_START, *_FAULT[:7], *early, resumed, until=120) == (
        90,
        {"detection": 3, "waiting": 1 + 3, "start": 10 + 2 + 10, "restore": 1},
    )


def test_a_second_fit_of_a_model_restores_nothing():
    second = [_resumed(60, 400, 0, None), _mark(63, "advancing", 401)]
    assert _measured(*_START, _mark(50, "ended", 400), *second) == (
        40 + 137,
        {"start": 13},
    )


def test_what_comes_after_the_end_does_not_count():
    done = [_mark(50, "ended", 400), _event(60, "done")]
    assert _measured(*_START, *done) == (40, {"start": 10})
    stopped = _event(50, "stopped")
    assert _measured(*_START, stopped) == (40, {"start": 10})
    # A group that failed for good is lost until the run ends.
    end = {"time": 90, "event": "end", "group": None}
    assert _measured(*_START, _event(50, "failed"), end) == (
        40,
        {"start": 10, "waiting": 40},
    )


def test_a_worker_of_servers_that_comes_back_stops_nobody():
    back = [_event(50, "worker_restart"), _event(51, "start", task="b")]
    ready = _event(55, "ready", task="b")
    assert _measured(*_START, *back, ready) == (190, {"start": 10})


def test_without_a_launcher_marks_are_enough():
    first = [_resumed(0, 0, 0, None), _mark(8, "advancing", 1)]
    later = [_resumed(60, 40, 52, 50), _mark(62, "repeating", 41)]
    found = _measured(*first, *later, _mark(70, "advancing", 53), until=100)
    lost = {"start": 8, "detection": 10, "restore": 2, "repeated": 8}
    assert found == (42 + 30, lost)


def test_an_earlier_launch_does_not_count():
    early = [_resumed(-90, 0, 0, None), _mark(-80, "advancing", 1)]
    # It had come to 80, and the new launch resumes from 60.
    now = [_resumed(6, 60, 80, -20), _mark(8, "repeating", 61)]
    later = [*now, _mark(10, "advancing", 81)]
    assert _measured(*early, *_START[:4], *later) == (
        190,
        {"start": 8, "repeated": 2},
    )


def test_marks_know_the_furthest_step_of_all_attempts(tmp_path):
    for resumed, last, steps in (
        (0, None, (1, 2)),
        (1, {"step": 5, "time": 7.0}, (2, 3)),
        (1, {"step": 3, "time": 9.0}, (2, 5, 6, 7)),
    ):
        marks = goodput.Marks(tmp_path)
        marks.resume(resumed, last)
        for step in steps:
            marks.see(step)
    marks.end(7)
    # A second `fit` repeats none of these.
    marks.resume(0, None, fit=2)
    marks.see(1)
    lines = run_events.read(tmp_path / "attempts.jsonl")
    assert [(line["event"], line["step"]) for line in lines] == [
        *[("resumed", 0), ("advancing", 1)],
        *[("resumed", 1), ("repeating", 2)],
        *[("resumed", 1), ("repeating", 2), ("advancing", 6)],
        ("ended", 7),
        *[("resumed", 0), ("advancing", 1)],
    ]


def _write(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("layout", ["one file", "by group"])
def test_a_run_counts_all_its_groups(tmp_path, layout):
    # The second group is done early, and had no fault.
    other = [{**line, "group": 1} for line in (*_START[:4], _event(30, "done"))]
    events = {0: [x for x in (*_START, *_FAULT) if "group" in x], 1: other}
    end = {"time": 200, "event": "end", "group": None, "exit_code": 0}
    if layout == "one file":
        lines = [*events[0], *events[1], end]
        _write(tmp_path / "logs" / "events.jsonl", lines)
    else:
        for group, lines in events.items():
            name = f"events_group_{group}.jsonl"
            _write(tmp_path / "logs" / name, [*lines, end])
    marks = [x for x in (*_START, *_FAULT) if "group" not in x]
    _write(tmp_path / "group_0" / "attempts.jsonl", marks)
    _write(tmp_path / "group_1" / "attempts.jsonl", [_mark(10, "advancing")])
    run = observed_run.ObservedRun(tmp_path, clock=lambda: 300.0)
    first, second = (run.look() and run.look()).groups
    assert (second.spent.good, second.spent.lost["start"]) == (20, 10)
    found = goodput.of_groups(tmp_path, [0, 1], until=300.0)
    assert found == {0: first.spent, 1: second.spent}
    assert (first.spent.good, first.spent.total) == (175, 200)
    both = first.spent + second.spent
    assert both.to_json() == {
        "share": round(195 / 230, 4),
        "lost": {**_LOST, "start": 22},
    }
    assert "goodput 87.5%" in tables.group_line(first)
