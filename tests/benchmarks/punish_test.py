"""Faults on purpose: a run outlives each, and what must hold is watched."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

import tfdistill
from benchmarks.punish import run_view
from benchmarks.punish import watch as watch_lib
from tfdistill.status import run_events

_ROOT = pathlib.Path(__file__).resolve().parents[2]


# A fault that ends a group takes a restart, so there is one of them.
_FAULTS = ("kill", "corrupt", "disk_full")


@pytest.mark.multiprocess
@pytest.mark.deep
def test_a_run_holds_out_against_faults(tmp_path, no_process_left):
    workdir = tmp_path / "run"
    soak = subprocess.run(
        [
            *[sys.executable, "-m", "benchmarks.soak", f"--workdir={workdir}"],
            *["--num_groups=2", "--workers_per_group=1", "--seed=3"],
            *[f"--minutes={len(_FAULTS) * 3 / 60}", "--mtbf_secs=3"],
            f"--faults={','.join(_FAULTS)}",
        ],
        cwd=_ROOT,
        capture_output=True,
        text=True,
    )
    assert soak.returncode == 0, soak.stderr
    record = json.loads(soak.stdout)
    report = record["round"]
    log = workdir / "soak" / "punish" / "log.jsonl"
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    told = f"{record}\n{soak.stderr}"
    assert record["clean"] and not report["violations"], told
    # All were injected, and had something to hit.
    assert report["by_fault"] == dict.fromkeys(sorted(_FAULTS), 1), told
    assert all(entry["target"] for entry in entries), told
    assert report["versions_verified"] > 0, told
    assert sum(entry["halts"] for entry in entries) == 1, told
    assert 0 < report["goodput"] <= 1, told


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
