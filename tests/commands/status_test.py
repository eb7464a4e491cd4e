"""Tests of the status command, as people and scripts use it."""

import os
import pathlib
import subprocess
import sys
import time

import pytest

from tests.cases import runs as cases
from tests.cases import tasks
from tfdistill.commands import status as command
from tfdistill.launcher import local_cluster
from tfdistill.launcher import local_run

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def _run(tmp_path, *teachers, **more):
    now = time.time()
    lines = [
        cases.line(step, now - 20 + step, loss=0.5, teachers=list(teachers))
        for step in (8, 10)
    ]
    cases.metrics(tmp_path, 0, lines[0], lines[1] | more)
    return tmp_path


def _main(capsys, *arguments):
    code = command.main([str(argument) for argument in arguments])
    return code, capsys.readouterr().out


def test_what_people_see(tmp_path, capsys):
    reasons = {"5": "its outputs must be finite.", "6": "damaged [it] is."}
    teacher = cases.teacher(
        health="fading",
        share=0.25,
        reason="older than 10 steps",
        num_quarantined=2,
        quarantined=reasons,
        teacher_loss=0.75,
    )
    _run(tmp_path, teacher)
    code, out = _main(capsys, tmp_path)
    rows = [line.split() for line in out.splitlines()]
    assert code == 0
    assert rows[1][:3] == ["group", "state", "step"]
    assert rows[3][:4] == ["0", "running", "10/100", "0.5000"]
    found = ["0", "group_1", "8", "fading", "0.25", "2"]
    found += ["-", "-", "-", "0.7500", "-"]
    assert found in rows
    newest = f"group_1, version 6 quarantined, 2 in all: {reasons['6']}"
    assert newest in out


def test_a_slow_worker_is_named_while_it_is_slow(tmp_path, capsys):
    text = "worker:1 makes its group wait: of the last 20 steps"
    _run(tmp_path, slow_workers=[text])
    assert f"group 0, {text}" in _main(capsys, tmp_path)[1]
    _run(tmp_path, slow_workers=[])
    assert text not in _main(capsys, tmp_path)[1]


def test_without_a_directory_it_shows_the_newest_run(
    tmp_path, capsys, monkeypatch, refused
):
    monkeypatch.chdir(tmp_path)
    assert "last_run contains no run" in refused(command.main)
    _run(tmp_path / "last_run")
    assert command.main([]) == 0
    assert "group" in capsys.readouterr().out


def test_check_tells_by_the_exit_code(tmp_path, capsys):
    _run(tmp_path)
    assert _main(capsys, tmp_path, "--check")[0] == 0
    cases.metrics(tmp_path, 1, cases.line(3, 5.0))
    path = tmp_path / "group_1" / "metrics.jsonl"
    os.utime(path, (5.0, 5.0))
    assert _main(capsys, tmp_path)[0] == 0
    code, out = _main(capsys, tmp_path, "--check")
    assert code == 1
    assert "silent for" in out


def test_watch_ends_with_the_run_and_repeats_nothing(tmp_path, capsys):
    _run(tmp_path, event="end")
    code, out = _main(capsys, tmp_path, "--watch")
    assert code == 0
    assert out.count("group 0: done") == 1


def test_text_of_others_cannot_steer_the_terminal(tmp_path, capsys):
    bad = "\x1b]0;title\x07 [bold]x[/bold] [/nothing]\r\nnext"
    _run(tmp_path, cases.teacher(name=bad, health=bad, quarantined={"5": bad}))
    cases.events(
        tmp_path, ("start", 0, 9, {}), ("failed", 0, 5, {"reason": bad})
    )
    _, out = _main(capsys, tmp_path)
    assert "\x1b" not in out and "\x07" not in out and "\r" not in out
    assert "[bold]x[/bold] [/nothing] next" in out


@pytest.mark.multiprocess
@pytest.mark.usefixtures("no_process_left")
def test_a_real_run_that_failed_and_came_back(tmp_path):
    """Without TensorFlow, also as a program of its own."""
    code = (
        "import pathlib, sys\n"
        f"mark = pathlib.Path({str(tmp_path / 'mark')!r})\n"
        "if not mark.exists():\n"
        "    mark.touch()\n"
        "    sys.exit('ValueError: the first try')\n"
    )
    topology = local_cluster.LocalCluster(
        command=[sys.executable, "-c", code],
        workdir=str(tmp_path / "run"),
        max_restarts=2,
        start="spawn",
    )
    with local_run.LocalRun(topology) as run:
        assert tasks.end(run).exit_code == 0
    program = (
        "import sys\n"
        "from tfdistill.commands import status as command\n"
        "code = command.main()\n"
        "assert 'tensorflow' not in sys.modules, 'TensorFlow was imported'\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        cwd=_ROOT,
        check=True,
    )
    assert done.stdout.splitlines()[3].split()[:2] == ["0", "done"]
    told = "group_0_worker_0: ValueError: the first try (exit code 1)"
    assert told in done.stdout
