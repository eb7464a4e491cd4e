"""Faults on purpose: a run outlives each, and what must hold is watched."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

import tfdistill
from benchmarks.punish import run_view
from benchmarks.punish import watch as watch_lib
from tests.cases import waits
from tfdistill.status import run_events

_ROOT = pathlib.Path(__file__).resolve().parents[2]


# By how groups teach. A fault that ends a group takes a restart, so there is
# one of them; of those of predictions there is none, as they must catch up.
_FAULTS = {
    "versions": ("kill", "corrupt", "disk_full"),
    "predictions": ("pause", "forged", "wrong"),
}


@pytest.fixture
def launched(tmp_path, by):
    """Two groups that train longer than any round here."""
    workdir = tmp_path / "run"
    command = [
        *[sys.executable, "-m", "launch.local", f"--workdir={workdir}"],
        *["--num_groups=2", "--max_restarts=100"],
        *["--on_group_failure=continue", "--"],
        *[sys.executable, "-m", "benchmarks.soak_task"],
        *["--num_steps=1000000", "--steps_per_second=10"],
        f"--by={by}",
    ]
    with (tmp_path / "launcher.log").open("wb") as log:
        launcher = subprocess.Popen(
            command, cwd=_ROOT, stdout=log, stderr=subprocess.STDOUT
        )
    yield launcher, workdir
    launcher.kill()  # Its tasks end with it.
    launcher.wait()


def _wait_for_start(launcher, workdir):
    path = workdir / "logs" / run_events.NAME

    def started():
        return path.exists() and '"start"' in path.read_text()

    waits.until(lambda: launcher.poll() is not None or started())
    assert launcher.poll() is None


@pytest.mark.multiprocess
@pytest.mark.parametrize("by", ["versions", "predictions"])
@pytest.mark.deep
def test_a_run_holds_out_against_faults(launched, by):
    launcher, workdir = launched
    _wait_for_start(launcher, workdir)
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
            "--mtbf_secs=3",
            f"--faults={','.join(names)}",
        ],
        cwd=_ROOT,
        capture_output=True,
        text=True,
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
    assert sum(entry["halts"] for entry in entries) == 1, told
    assert list(run_view.processes_of(workdir))
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait() == 128 + signal.SIGTERM
    assert not list(run_view.processes_of(workdir))


def test_a_broken_version_that_nobody_damaged_is_told(tmp_path):
    record = {
        "topology": {"num_groups": 1, "ps_per_group": 0, "exchange": None},
    }
    (tmp_path / "launch.json").write_text(json.dumps(record))
    (tmp_path / "logs").mkdir()
    events = run_events.EventLog(tmp_path / "logs" / run_events.NAME)
    events.add("start", task="group_0_worker_0", pid=os.getpid())
    view = run_view.RunView(str(tmp_path))
    watch = watch_lib.Watch(view)

    def write(directory):
        pathlib.Path(directory, "saved_model.pb").write_text("graph")
        pathlib.Path(directory, "values").write_text("values")

    exchange = tfdistill.Exchange(view.exchange, key=None)
    version = exchange.publish(write, group=0, step=25)
    watch.look_at_versions()
    assert watch.num_versions == 1 and not watch.violations
    version = exchange.publish(write, group=0, step=50)
    pathlib.Path(version.path, "values").write_text("torn")
    watch.look_at_versions()
    assert "a broken version is visible" in watch.violations[0]
