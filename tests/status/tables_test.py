"""Tests of what is shown of a run while it runs."""

import io

import pytest
import rich.console
import rich.text

from tests.cases import runs as cases
from tfdistill.status import group
from tfdistill.status import result
from tfdistill.status import tables


def _records(*steps, pace_secs=0.5, **more):
    return [{"step": s, "time": 1e9 + pace_secs * s} | more for s in steps]


def test_status_line_holds_what_is_known():
    status = group.GroupStatus(1)
    assert tables.group_line(status) == "group 1: starting"
    status.state = "running"
    values = {"loss": 1.5, "task_loss": 0.51234, "total_steps": 500}
    values |= {"examples_per_second": 1234.5, "teacher_staleness": None}
    values |= {"val_loss": 0.25, "val_auc": 0.75}
    status.update(_records(10, 20, **values))
    assert tables.group_line(status) == (
        "group 1: running, step 20/500, task loss 0.5123, validation auc"
        " 0.7500, examples/s 1,234, time left 4:00"
    )


def test_time_left_follows_the_recent_pace_after_the_first_execution():
    status = group.GroupStatus(0, "running")
    status.update(_records(0, event="start", total_steps=1000))
    status.update(_records(1, pace_secs=100))
    assert status.secs_left is None and status.has_stepped
    status.update([{"step": 2, "time": 1e9 + 102}])
    assert status.secs_left == pytest.approx((1000 - 2) * 2)
    status.update(_records(*range(900, 920), pace_secs=2))
    assert status.secs_left == pytest.approx((1000 - 919) * 2)
    status.update(_records(1005, pace_secs=2))
    assert status.secs_left == 0


def test_a_terminal_has_the_time_since_the_start_and_a_bar_in_place():
    status, seen = group.GroupStatus(0, since=1e9), []
    for values in ({}, {"step": 250, "time": 1e9 + 9, "total_steps": 500}):
        if values:
            status.update([values | {"loss": 0.5, "val_accuracy": 0.875}])
        console = rich.console.Console(
            file=io.StringIO(), force_terminal=True, width=80
        )
        console.print(tables.view(_run(status, now=9.6), console, whole=False))
        seen.append(rich.text.Text.from_ansi(console.file.getvalue()).plain)
    (start, running) = (text.splitlines() for text in seen)
    assert start[1] == running[1]  # Columns stay where they are.
    assert start[3].split()[:3] == ["0", "starting", "0:10"]
    assert running[3].split()[:3] == ["0", "running", "250/500"]
    assert "━━━━━" in running[3] and "accuracy 0.8750" in running[3]


def _run(*statuses, now=0.0):
    return group.RunStatus(time=1e9 + now, groups=statuses)


def _lines(*statuses, width, **options):
    stream = io.StringIO()
    console = rich.console.Console(file=stream, width=width)
    console.print(tables.view(_run(*statuses), console, **options))
    return stream.getvalue().splitlines()


def test_plain_lines_are_rare_and_only_on_change():
    stream = io.StringIO()
    display = tables.Lines(stream)
    status = group.GroupStatus(0)

    def shown(now):
        before = len(stream.getvalue())
        display.show(_run(status, now=now))
        return stream.getvalue()[before:]

    assert shown(0.0) == "[    0.0 s] group 0: starting\n"
    assert shown(60.0) == ""
    status.state = "running"
    assert "running" in shown(60.1)  # A new state is shown at once.
    status.update([{"step": 1}])
    assert shown(65.0) == ""
    assert "step 1" in shown(65.5)
    status.update([{"step": 2}])
    assert shown(70.0) == ""
    status.state = "done"
    assert "done, step 2" in shown(70.0)
    display.say("a [b] c")
    assert stream.getvalue().endswith("a [b] c\n")


def test_messages_on_a_terminal_stay_above_the_table():
    console = rich.console.Console(
        file=io.StringIO(), force_terminal=True, width=80
    )
    with tables.Screen(console, keep=False) as screen:
        screen.show(_run(group.GroupStatus(0)))
        screen.say("group 0 failed: KeyError: 'a [b] c'")
    text = rich.text.Text.from_ansi(console.file.getvalue()).plain
    message = text.index("a [b] c")
    assert text.index("starting") < message < text.rindex("starting")


@pytest.mark.parametrize(
    "num_groups, record, told",
    [
        (1, {}, None),
        (1, {"distillation_weight": 0.0}, "let two groups teach each other: B"),
        (2, {}, "check whether it's worth it: C"),
        (2, {"untaught": "why"}, "groups 0, 1 never used a teacher: why"),
    ],
)
def test_a_result_ends_with_what_is_next(tmp_path, num_groups, record, told):
    commands = result.Commands(two_groups="B", compare="C")
    groups = [
        group.GroupStatus(number, "done", record=record)
        for number in range(num_groups)
    ]
    console = rich.console.Console(file=io.StringIO(), width=80)
    shown = result.view(
        _run(*groups), workdir=tmp_path, exchange="", secs=9, commands=commands
    )
    console.print(shown, soft_wrap=True)
    lines = console.file.getvalue().splitlines()
    assert lines[1] == f"groups: {num_groups} done after 0:09"
    last = lines[-1].split(maxsplit=1)
    assert last == ["next", told] if told else last[0] == "logs"


def _troubled():
    status = group.GroupStatus(0, state="running")
    teacher = cases.teacher(num_quarantined=3)
    teacher["quarantined"] = {"7": "its outputs [must] be finite: " * 9}
    status.update(_records(10, 20, loss=0.5, total_steps=500, published=15))
    status.update([{"teachers": [teacher], "distillation_loss": 0.1}])
    status.num_restarts = 2
    status.last_error = "group_0_worker_1 ended with exit code 3"
    return status


@pytest.mark.parametrize("width", [116, 60, 20])
def test_the_view_fits_the_terminal(width):
    lines = _lines(_troubled(), width=width, whole=False)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "running" in text or width == 20
    assert ("validation" in lines[1]) == (width >= 60)
    assert ("newest" in lines[1]) == (width >= 116)
    # A table of one group, two notes, which are cut, and one of a teacher.
    assert len(lines) == 5 + 2 + 5
    if width == 116:
        (row,) = [line.split() for line in lines if "20/500" in line]
        assert row[:4] == ["0", "running", "20/500", "0.5000"]
        assert {"15", "1/1", "2"} <= set(row)
        assert "3 in all: its outputs [must] be finite" in text
        assert "group 0, last error: group_0_worker_1 ended" in text


@pytest.mark.parametrize("width", [80, 120])
def test_of_many_teachers_those_that_are_not_good_are_named(width):
    groups = []
    for number in range(16):
        status = group.GroupStatus(number, state="running")
        names = [f"group_{peer}" for peer in range(16) if peer != number]
        teachers = [cases.teacher(name, step=7) for name in names]
        if number == 3:
            teachers[5] |= {"health": "fading", "share": 0.5, "step": 2}
            teachers[5] |= {"swaps": 9, "num_unheard": 1, "lag_secs": 1.52}
            teachers[5]["bytes"] = 4_200_000
        status.update([{"step": 10, "teachers": teachers}])
        groups.append(status)
    lines = _lines(*groups, width=width)
    # A row for each group, and one for the teacher.
    assert len(lines) == 16 + 4 + 1 + 4
    assert max(map(len, lines)) <= width
    rows = [" ".join(line.split()) for line in lines]
    assert "3 group_6 2 fading 0.50 2 9/10 4.2 1.5 s - -" in rows
    for number, row in enumerate(rows[3:19]):
        what = "14/15 good" if number == 3 else "15/15 good"
        assert row.startswith(f"{number} running 10")
        assert (what in row) == (width == 120)


def test_many_notes_are_counted_and_those_of_groups_come_first():
    groups = [_troubled() for _ in range(12)]
    lines = _lines(*groups, width=1000)
    assert sum("last error" in line for line in lines) == 12
    assert sum("version 7 quarantined" in line for line in lines) == 4
    assert "8 more notes" in lines


@pytest.mark.parametrize(("missed", "told"), [(11, False), (12, True)])
def test_a_peer_that_misses_many_batches_is_told_of_once(missed, told):
    stream = io.StringIO()
    display = tables.Lines(stream)
    status = group.GroupStatus(0)
    peer = cases.teacher(num_answers=100, num_forged=2)
    for more in range(3):
        peer["num_missed"] = missed + more * told
        status.record["teachers"] = [peer]
        display.show(_run(status))
    text = stream.getvalue()
    note = f"group_1: no predictions for {missed} of {100 + missed} batches"
    assert (note in text) == told
    assert text.count("no predictions") == told
    assert text.count("messages from outside the run: 2") == 1
