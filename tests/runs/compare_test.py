"""Comparisons with real runs: stopped, gone on with, failed."""

import json
import os
import pathlib
import signal
import threading

import numpy as np
import pytest
from sklearn import datasets

from tests.cases import docs_blocks
from tests.cases import runs
from tfdistill.commands import compare
from tfdistill.held_out import predictions

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


@pytest.mark.deep
@pytest.mark.multiprocess
@pytest.mark.usefixtures("stopped_after_a_run")
def test_a_stopped_comparison_goes_on_where_it_was(
    tmp_path, no_process_left, capsys
):
    methods = "offline_distillation,codistill"
    options = _options(tmp_path / "c", f"--methods={methods}", "--trials=1")
    assert compare.main(options) == 130
    assert "run the same command again to resume" in capsys.readouterr().out
    before = _times(tmp_path / "c")
    assert compare.main(options) == 0
    assert f"{len(before)} of 3 runs are done" in capsys.readouterr().out
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


def _page(name):
    """A file of the tutorial, with fewer steps."""
    (block,) = (
        block
        for block in docs_blocks.blocks("docs/tutorial_compare.md")
        if block.file_name == name
    )
    text = block.text
    for long, short in (
        ("epochs=10", "epochs=2"),
        ("epochs=20", "epochs=2"),
        ("BurnIn(steps=100)", "BurnIn(steps=10)"),
        ("num_steps=300", "num_steps=20"),
    ):
        text = text.replace(long, short)
    pathlib.Path(name).write_text(text)


@pytest.mark.deep
@pytest.mark.multiprocess
@pytest.mark.usefixtures("no_process_left")
def test_a_training_script_is_compared_by_its_environment(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    _page("my_train.py")
    options = ["my_train.py", "--held-out=digits", "--trials=2"]
    assert compare.main(options) == 0
    said = capsys.readouterr().out
    assert "codistillation on shared data: 2 trial(s)" in said
    made = tmp_path / "last_comparison"
    methods = json.loads((made / "report.json").read_text())["methods"]
    assert list(methods) == ["independent", "codistill_shared"]
    heard = {"independent": [], "codistill_shared": ["group_1"]}
    for name, teachers in heard.items():
        trials = methods[name]["trials"]
        paths = [made / run for trial in trials for run in trial["runs"]]
        found = [
            json.loads((path / "group_0" / "results.json").read_text())
            for path in paths
        ]
        assert [one["obeyed"]["seed"] for one in found] == [0, 1]
        for one in found:
            assert [each["name"] for each in one["teachers"]] == teachers
            assert one["steps"] == 100 and one["examples"] == 6400
        assert methods[name]["churn"]["churn"]["mean"] > 0.01
    assert trials[0]["figures"]["total_examples"] == 2 * 6400
    # The same command trains nothing more; another script is another one.
    assert compare.main([*options, "--report-only"]) == 0
    pathlib.Path("my_train.py").write_text("")
    assert compare.main([*options, "--trials=1"]) == 1
    assert "Add tfdistill.callbacks.HeldOut" in capsys.readouterr().out
    assert sorted(os.listdir("comparisons")) == ["1", "2"]


@pytest.mark.deep
@pytest.mark.multiprocess
@pytest.mark.usefixtures("no_process_left")
def test_an_ordinary_script_is_compared_as_it_stands(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    _page("train.py")
    names = ("independent", "codistill", "predictions", "weight_decay")
    options = ["train.py", f"--methods={','.join(names)}", "--trials=2"]
    assert compare.main(options) == 0, capsys.readouterr().out
    made = tmp_path / "last_comparison"
    methods = json.loads((made / "report.json").read_text())["methods"]
    found = {}
    for name in names:
        (run,) = methods[name]["trials"][1]["runs"]
        text = (made / run / "group_0/results.json").read_text()
        found[name] = json.loads(text)
        # The last 30% of the rows, in all trials and groups.
        for trial in methods[name]["trials"]:
            path = made / trial["runs"][0] / "group_0/predictions.npz"
            labels = predictions.read(path.parent).labels
            np.testing.assert_array_equal(labels, _digits()[1257:])
    taught = [[t["name"] for t in found[name]["teachers"]] for name in names]
    assert taught == [[], ["group_1"], ["group_1"], []]
    examples = [found[name]["examples"] for name in names]
    assert examples == [2 * 1257, 2 * 629, 2 * 1257, 2 * 1257]
    assert found["weight_decay"]["obeyed"]["weight_decay"] == 0.1
    assert found["independent"]["obeyed"]["seed"] == 1
    assert methods["independent"]["churn"]["churn"]["mean"] > 0.01


def _digits():
    return datasets.load_digits().target
