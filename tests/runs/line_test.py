"""A line from its first training on, by its commands and real trainings."""

import json
import os

import keras
import numpy as np
import pytest
import tensorflow as tf

from launch import line as program
from tests.cases import docs_blocks
from tests.cases import object_store
from tests.cases import waits
from tests.programs import commands
from tfdistill.commands import main
from tfdistill.contrib.line import store
from tfdistill.held_out import predictions

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.usefixtures("no_process_left"),
]


_COMMAND = main.load("line")


def _workload():
    (script,) = [
        block.text
        for block in docs_blocks.blocks("docs/tutorial_line.md")
        if block.file_name == "my_line.py"
    ]
    return script


def _line(name, *options):
    return _COMMAND.main([name, "clicks", *options])


def _killed_in_training(start, *options):
    """Kills a retrain with all of its tasks once they train."""
    process = start(program, "retrain", os.path.abspath("clicks"), *options)

    def trains():
        assert process.poll() is None, process.text()
        return os.path.exists("clicks/candidates/2/run/group_0")

    waits.until(trains)
    process.end()
    assert not os.path.exists("clicks/candidates/2/lineage.json")


@pytest.mark.deep
def test_a_model_is_retrained_from_the_one_that_serves(
    tmp_path, monkeypatch, capfd, caplog
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_line.py").write_text(_workload())
    line = store.Line("clicks")
    assert _line("init", "my_line.py") == 0
    assert _line("retrain", "--span=0,1,2,3") == 0
    assert _line("judge") == 0
    assert _line("promote") == 0
    assert line.promoted() == 1

    with commands.starting(tmp_path) as start:
        _killed_in_training(start, "--span=4")
    assert _line("retrain", "--span=4") == 0
    assert "candidates/2" in capfd.readouterr().out
    assert _line("retrain", "--span=4", "--controls") == 0
    assert "already trained on 4" in capfd.readouterr().out
    lineage = line.lineage(2)
    assert (lineage["parent"], lineage["spans"]) == (1, list("01234"))
    assert lineage["seed"] == 0
    assert lineage["examples"] == 128 * lineage["steps"]
    # Tested before it was trained on, by what served then.
    promoted = tf.saved_model.load(line.version_path(1))
    tested = predictions.read("clicks/candidates/2/promoted")
    assert lineage["progressive"].keys() == tested.figures().keys()
    # It kept to the budget, though it is another model.
    candidate = predictions.read("clicks/candidates/2/run/group_0")
    assert 0 < candidate.churn(tested)["churn"] < 1.2 * 0.005

    # The controls took as many examples.
    controls = json.loads(
        (tmp_path / "clicks/candidates/2/controls.json").read_text()
    )
    for name in ("fresh", "warm_start", "pair", "ensemble"):
        rest = lineage["examples"] - controls[name]["examples"]
        assert 0 <= rest <= 128, name
    assert controls["warm_start"]["churn"] < controls["fresh"]["churn"]

    assert _line("judge") == 0
    report = json.loads(
        (tmp_path / "clicks/candidates/2/report.json").read_text()
    )
    assert report["verdict"] == "promote"
    text = (tmp_path / "clicks/candidates/2/report.md").read_text()
    assert "| two groups that teach each other, too |" in text
    assert _line("promote") == 0
    assert line.promoted() == 2
    served = tf.saved_model.load(line.version_path(2))
    x = np.random.default_rng(0).normal(size=(5, 8)).astype("float32")
    assert not np.allclose(served.serve(x), promoted.serve(x))
    extra = tmp_path / "clicks/versions/2/assets.extra"
    assert {"lineage.json", "report.json", "student.keras", "training"} <= set(
        os.listdir(extra)
    )
    # What was published last is what the budget left.
    student = keras.saving.load_model(extra / "student.keras")
    np.testing.assert_allclose(served.serve(x), student(x), rtol=1e-4)
    assert _line("status") == 0
    assert "promoted" in capfd.readouterr().out
    assert _line("rollback") == 0
    assert line.promoted() == 1

    # Another architecture learns from predictions only.
    script = _workload().replace("Dense(32", "Dense(16")
    (tmp_path / "my_line.py").write_text(script)
    assert _line("retrain", "--span=5") == 1
    assert "`warm_start` must have the same" in caplog.text
    assert "--new-weights" in caplog.text
    assert _line("retrain", "--span=5", "--new-weights") == 0
    assert line.lineage(3)["warm_start"] is False


@pytest.mark.deep
def test_a_line_in_a_bucket_has_the_same_commands(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_line.py").write_text(_workload())
    with object_store.serve() as server:
        url = f"{server.url}/clicks"

        def call(name, *options):
            return _COMMAND.main([name, url, *options])

        assert call("init", "my_line.py") == 0
        for span in ("0,1,2,3", "4"):
            assert call("retrain", f"--span={span}", "--workdir=work") == 0
            for name in ("judge", "promote"):
                assert call(name, "--workdir=work") == 0
        line = store.Line(url, workdir="other")
        assert line.promoted() == 2
        lineage = line.lineage(2)
        assert lineage["warm_start"] and lineage["spans"] == list("01234")
        live = ("--version=2", "--log-loss=2", "--examples=9999")
        assert call("report", *live) == 4
        assert line.promoted() == 1
        assert call("judge", "--workdir=work") == 3
        assert (
            "2 was rolled back: Version 2 has a live" in capfd.readouterr().out
        )
        assert call("status") == call("log") == call("rollback") == 0
        assert "rolled back" in capfd.readouterr().out
