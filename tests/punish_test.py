import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from launch.punishment import faults
from launch.punishment import processes

_ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture
def launched(tmp_path):
    """Two groups of two workers that train longer than any round here."""
    workdir = tmp_path / "run"
    command = [
        *[sys.executable, "-m", "launch.local", f"--workdir={workdir}"],
        *["--num_groups=2", "--workers_per_group=2", "--max_restarts=100"],
        *["--on_group_failure=continue", "--plain", "--"],
        *[sys.executable, "-m", "benchmarks.soak_task"],
        *["--num_steps=1000000", "--steps_per_second=10"],
        "--backup_every_steps=20",
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
def test_a_run_holds_out_against_one_fault_of_each_kind(launched):
    launcher, workdir = launched
    _wait_for_record(launcher, workdir)
    count = len(faults.FAULTS)
    round_ = subprocess.run(
        [
            *[sys.executable, "-m", "launch.punish", f"--workdir={workdir}"],
            *["--seed=3", f"--minutes={count * 5 / 60}", "--every_secs=5"],
            "--calm_secs=3",
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
    assert report["by_fault"] == dict.fromkeys(sorted(faults.FAULTS), 1), told
    assert all(entry["target"] for entry in entries), told
    assert report["versions_verified"] > 0, told
    ended = [entry for entry in entries if "recovery_secs" in entry]
    assert len(ended) == 4, told
    # Backups every 20 steps; one may be left out while one is written.
    assert all(entry["redone_steps"] <= 60 for entry in ended), told
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(60) == 128 + signal.SIGTERM
    name, value = "TFDISTILL_WORKDIR", os.fspath(workdir)
    assert not list(processes.with_variable(name, value))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
