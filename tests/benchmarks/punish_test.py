"""Faults on purpose: a run outlives each, and what must hold is watched."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

import tfdistill
from benchmarks.punish import faults
from benchmarks.punish import run_view
from benchmarks.punish import watch as watch_lib

_ROOT = pathlib.Path(__file__).resolve().parents[2]


# By how groups teach; each kind of fault once. None of those of predictions
# ends a group: catching up takes as long as the restart did.
_OF_PREDICTIONS = ("pause", *faults.MESSAGE_FAULTS)
_FAULTS = {
    "versions": tuple(n for n in faults.FAULTS if n not in _OF_PREDICTIONS),
    "predictions": _OF_PREDICTIONS,
}


@pytest.fixture
def launched(tmp_path, by):
    """Two groups that train longer than any round here."""
    workdir = tmp_path / "run"
    command = [
        *[sys.executable, "-m", "launch.local", f"--workdir={workdir}"],
        *["--num_groups=2", "--max_restarts=100"],
        *["--on_group_failure=continue", "--plain", "--"],
        *[sys.executable, "-m", "benchmarks.soak_task"],
        *["--num_steps=1000000", "--steps_per_second=10"],
        *["--backup_every_steps=20", f"--by={by}"],
    ]
    with (tmp_path / "launcher.log").open("wb") as log:
        launcher = subprocess.Popen(
            command, cwd=_ROOT, stdout=log, stderr=subprocess.STDOUT
        )
    yield launcher, workdir
    launcher.kill()  # Its tasks end with it.
    launcher.wait()


def _wait_for_record(launcher, workdir):
    deadline = time.monotonic() + 120
    while not (workdir / "launch.json").exists():
        assert launcher.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.multiprocess
@pytest.mark.timeout_secs(800)
@pytest.mark.parametrize("by", _FAULTS)
def test_a_run_holds_out_against_one_fault_of_each_kind(launched, by):
    launcher, workdir = launched
    _wait_for_record(launcher, workdir)
    names = _FAULTS[by]
    round_ = subprocess.run(
        [
            *[
                sys.executable,
                "-m",
                "benchmarks.punish",
                f"--workdir={workdir}",
            ],
            *["--seed=3", f"--minutes={len(names) * 3 / 60}"],
            *["--every_secs=3", "--calm_secs=2"],
            f"--faults={','.join(names)}",
        ],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=700,
    )
    report = json.loads(round_.stdout)
    log = (workdir / "punish" / "log.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in log]
    told = f"{report}\n{round_.stderr}"
    assert not report["violations"], told
    assert round_.returncode == 0, told
    # All were injected, and had something to hit.
    assert report["by_fault"] == dict.fromkeys(sorted(names), 1), told
    assert all(entry["target"] for entry in entries), told
    assert report["versions_verified"] > 0, told
    ended = [entry for entry in entries if "recovery_secs" in entry]
    assert len(ended) == (5 if by == "versions" else 0), told
    # Backups every 20 steps; one may be left out while one is written.
    assert all(entry["redone_steps"] <= 60 for entry in ended), told
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(60) == 128 + signal.SIGTERM
    name, value = "TFDISTILL_WORKDIR", os.fspath(workdir)
    assert not list(run_view.with_variable(name, value))


def _sleeper(**env):
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import time; print(flush=True); time.sleep(600)",
        ],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
    )
    # Popen returns before the kernel shows the new program's environment.
    child.stdout.readline()
    return child


@pytest.fixture
def run(tmp_path):
    """Two groups of one sleeping task each, as the launcher records them."""
    children = [_sleeper(PUNISHED=str(tmp_path)) for _ in range(2)]
    record = {
        "pids": {
            f"group_{g}_worker_0": child.pid for g, child in enumerate(children)
        },
        "topology": {
            "num_groups": 2,
            "ps_per_group": 0,
            "exchange": None,
            "env": {},
            "command": [sys.executable, "-c", "raise SystemExit(3)"],
        },
    }
    (tmp_path / "launch.json").write_text(json.dumps(record))
    (tmp_path / "punish").mkdir()
    yield run_view.RunView(str(tmp_path)), children
    for child in children:
        child.kill()
        child.wait()
        child.stdout.close()


def _publish(view, group, step, text="values"):
    def write(directory):
        pathlib.Path(directory, "saved_model.pb").write_text("graph")
        pathlib.Path(directory, "values").write_text(text)

    exchange = tfdistill.Exchange(view.exchange, key=None)
    return exchange.publish(write, group=group, step=step)


# ---- what must hold ----


def _watched(view):
    watch = watch_lib.Watch(view)
    watch.look_at_versions()
    return watch


def test_a_broken_version_that_nobody_damaged_is_told(run):
    view, _ = run
    watch = _watched(view)
    version = _publish(view, 0, 25)
    pathlib.Path(version.path, "values").write_text("torn")
    watch.look_at_versions()
    assert "a broken version is visible" in watch.violations[0]
