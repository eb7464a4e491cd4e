"""Tests of `tfdistill.launch`, with tasks that are no trainers."""

import json
import os
import signal
import sys
import threading

import pytest

import tfdistill
from tests.cases import tasks
from tests.cases import waits

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.usefixtures("no_process_left"),
]


def _launch(tmp_path, code, **fields):
    return tfdistill.launch(
        [sys.executable, "-c", tasks.PRELUDE + code],
        workdir=tmp_path / "run",
        **{"start": "spawn"} | fields,
    )


def test_it_returns_the_states_and_the_metrics(tmp_path, capsys):
    code = (
        "connect()\n"
        "path = WORKDIR / f'group_{GROUP}'\n"
        "path.mkdir(exist_ok=True)\n"
        'said = \'{"step": 3, "loss": 0.5}\\n\'\n'
        "(path / 'metrics.jsonl').write_text(said)\n"
        "print(os.environ['MINE'])\n"
    )
    run = _launch(tmp_path, code, num_groups=2, env={"MINE": 7})
    assert [group.state for group in run.groups] == ["done", "done"]
    assert run.metrics(1) == [{"step": 3, "loss": 0.5}]
    results = json.loads((run.workdir / "results.json").read_text())
    for found, group in zip(results["groups"], (0, 1), strict=True):
        assert (found["group"], found["state"]) == (group, "done")
        assert (found["steps"], found["metrics"]["loss"]) == (3, 0.5)
    log = run.workdir / "logs" / "group_1_worker_0.log"
    assert log.read_text().splitlines()[-1] == "7"
    assert "group 1: done" in capsys.readouterr().out


def test_a_failure_is_raised_with_the_last_lines(tmp_path):
    code = "connect()\nprint('what went wrong')\nsys.exit(3 if GROUP else 0)"
    with pytest.raises(RuntimeError, match="what went wrong") as caught:
        _launch(tmp_path, code, num_groups=2, on_group_failure="continue")
    error = caught.value
    assert error.exit_code == 3
    assert "group_1_worker_0" in str(error)
    states = [group.state for group in error.launched.groups]
    assert states == ["done", "failed"]


def test_ctrl_c_stops_all_tasks_and_is_raised(tmp_path):
    def interrupt():
        started = tmp_path / "run" / "group_0_worker_0.steps"
        waits.until(started.exists)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        _launch(tmp_path, "connect()\ntrain(10_000)", workers_per_group=2)
    thread.join()
    assert signal.getsignal(signal.SIGINT) is handler
