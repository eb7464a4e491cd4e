"""Comparisons with real runs: stopped, gone on with, failed."""

import json
import logging
import os
import signal
import threading

import numpy as np
import pytest

from launch import compare
from tests.cases import runs

_SHORT = (
    "--override=num_steps=20",
    "--override=evaluate_every_steps=10",
    "--override=every_steps=5",
    "--override=burn_in_steps=5",
)


def _options(workdir, *options):
    return ["--recipe=digits", f"--workdir={workdir}", *_SHORT, *options]


def _times(workdir):
    return {
        path.parent.name: path.stat().st_mtime_ns
        for path in workdir.glob("runs/*/results.json")
    }


@pytest.fixture
def stopped_after_a_run(tmp_path):
    """Sends this process SIGTERM once, when a first run is done."""
    ending = threading.Event()

    def look():
        while not ending.wait(0.1):
            is_heard = signal.getsignal(signal.SIGTERM) is compare._interrupt
            if is_heard and _times(tmp_path / "c"):
                os.kill(os.getpid(), signal.SIGTERM)
                return

    thread = threading.Thread(target=look)
    thread.start()
    yield
    ending.set()
    thread.join()


@pytest.mark.multiprocess
@pytest.mark.timeout_secs(480)
@pytest.mark.usefixtures("stopped_after_a_run")
def test_a_stopped_comparison_goes_on_where_it_was(
    tmp_path, no_process_left, caplog
):
    methods = "offline_distillation,codistill"
    options = _options(tmp_path / "c", f"--methods={methods}", "--trials=1")
    caplog.set_level(logging.INFO)
    assert compare.main(options) == 130
    assert "the same command resumes from here" in caplog.text
    before = _times(tmp_path / "c")
    assert compare.main(options) == 0, caplog.text
    assert f"{len(before)} of 3 runs are done" in caplog.text
    after = _times(tmp_path / "c")
    assert len(after) == 3 and before.items() <= after.items()
    report = json.loads((tmp_path / "c" / "report.json").read_text())
    _check(report, tmp_path / "c")


def _check(report, workdir):
    assert list(report["methods"]) == ["offline_distillation", "codistill"]
    offline = report["methods"]["offline_distillation"]["trials"][0]
    teacher, student = (workdir / run for run in offline["runs"])
    config = json.loads((student / "config.json").read_text())
    path = config["method_arguments"]["saved_model"]
    assert path == str(teacher / "exchange" / "group_0" / "20")
    assert offline["figures"]["total_examples"] == 2 * 20 * 64
    assert runs.records(student / "group_0")[-1]["distillation_weight"] == 1.0
    codistilled = report["methods"]["codistill"]["trials"][0]
    assert codistilled["figures"]["versions_written"] >= 1
    curve = codistilled["curve"]
    assert curve["steps"] == [10, 20]
    assert np.all(np.isfinite(curve["log_loss"]))
    (run,) = codistilled["runs"]
    for group, copy in enumerate(codistilled["copies"]):
        kept = np.load(workdir / run / f"group_{group}" / "predictions.npz")
        chosen = kept["probabilities"][np.arange(500), kept["labels"]]
        assert copy["log_loss"] == pytest.approx(-np.log(chosen).mean())
    assert copy["log_loss"] == pytest.approx(
        _last(workdir / run / "group_1"), rel=1e-4
    )


def _last(directory):
    found = [r.get("val_log_loss") for r in runs.records(directory)]
    return [loss for loss in found if loss][-1]
