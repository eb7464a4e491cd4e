"""Tests of the language model's recipes, as one task runs them."""

import json

import keras
import numpy as np
import pytest

from launch import train
from tests.cases import language_model as cases
from tests.cases import runs
from tfdistill.held_out import predictions

SHORT = (
    "num_steps=20",
    "evaluate_every_steps=10",
    "exchange.every_steps=10",
    "exchange.refresh_every_steps=5",
    "codistillation.burn_in_steps=0",
    "codistillation.ramp_steps=0",
    "batch_size=8",
    "data.arguments.vocabulary_size=330",
    "data.arguments.sequence_length=8",
    "data.arguments.num_train_tokens=3000",
    "data.arguments.num_validation_tokens=300",
    "model.arguments.units=16",
)


pytestmark = [pytest.mark.deep, pytest.mark.usefixtures("one_device")]


def _run(tmp_path, *changes):
    path = cases.write(tmp_path / "a.txt.xz", cases.documents(200))
    options = (
        *SHORT,
        f"data.path={path}",
        f"data.arguments.cache_dir={tmp_path / 'cache'}",
        *changes,
    )
    return train.main(
        [
            "--recipe=language_model_small",
            f"--workdir={tmp_path / 'run'}",
            *(f"--override={option}" for option in options),
        ]
    )


def test_two_groups_learn_from_each_other(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TFDISTILL_NUM_GROUPS", "2")
    for group in range(2):
        monkeypatch.setenv("TFDISTILL_GROUP", str(group))
        assert _run(tmp_path) == 0
    assert "perplexity" in capsys.readouterr().out
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    directory = tmp_path / "run" / "group_1"
    lines = runs.records(directory)
    # Group 1 began when the other had ended: its teacher was there.
    assert lines[-1]["teachers"][0]["step"] == 20
    assert not lines[-1]["teachers"][0]["quarantined"]
    assert lines[-1]["distillation_loss"] > 0
    figures = results["groups"][1]["metrics"]
    ends = [line for line in lines if line.get("event") == "epoch_end"]
    assert figures["log_loss"] == pytest.approx(ends[-1]["val_loss"], rel=1e-4)
    assert figures["accuracy"] == pytest.approx(ends[-1]["val_accuracy"])
    assert figures["perplexity"] == pytest.approx(np.exp(figures["log_loss"]))
    found = predictions.read(directory)
    assert found.labels.shape == found.compared.shape == (296,)
    student = keras.models.load_model(directory / "student.keras")
    assert student.output_shape == (None, 8, 330)
