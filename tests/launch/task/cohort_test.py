"""A recipe of several students in one process."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from launch import recipes
from launch.task import outputs
from launch.task import students
from launch.task import training

_STUDENTS = "codistillation.num_students=2"


def _config(*overrides):
    short = [
        "num_steps=12",
        "evaluate_every_steps=6",
        "exchange.every_steps=12",
        "codistillation.burn_in_steps=0",
        "data.mode=coordinated",
    ]
    return recipes.override(recipes.digits(), [*short, *overrides])


def _train(workdir, *overrides, group=0):
    cluster = tfdistill.Cluster(
        group=group,
        num_groups=1 + group,
        workdir=str(workdir),
        exchange=str(workdir / "exchange"),
    )
    return training.run(
        _config(*overrides), cluster, strategy=tf.distribute.get_strategy()
    )


def test_students_have_the_files_of_groups(tmp_path):
    result = _train(tmp_path, _STUDENTS)
    found = outputs.read_results(tmp_path)
    assert [group["group"] for group in found["groups"]] == [0, 1]
    assert found["groups"][0] == result
    assert 0 < found["agreement"]["mean_absolute_churn"] < 1
    for group in found["groups"]:
        directory = outputs.group_dir(tmp_path, group["group"])
        assert group["steps"] == 12 and group["metrics"]["log_loss"] > 0
        last = [
            json.loads(line)
            for line in (directory / "metrics.jsonl").read_text().splitlines()
        ][-1]
        assert last["distillation_weight"] == 1.0
        assert last["val_log_loss"] == pytest.approx(
            group["metrics"]["log_loss"], rel=1e-4
        )
        assert not any("student_" in name for name in last)
        student = keras.models.load_model(directory / "student.keras")
        kept = np.load(directory / "predictions.npz")["probabilities"]
        assert student.output_shape[1:] == kept.shape[1:]


def test_without_a_weight_each_is_as_if_alone(tmp_path):
    _train(tmp_path / "both", _STUDENTS, "codistillation.weight=0")
    both = outputs.read_results(tmp_path / "both")["groups"]
    off = ["codistillation.enabled=false"]
    for number in (0, 1):
        alone = _train(tmp_path / str(number), *off, group=number)
        assert both[number]["metrics"]["log_loss"] == pytest.approx(
            alone["metrics"]["log_loss"], rel=1e-4
        )


def test_what_does_not_fit_is_refused():
    config = _config(_STUDENTS)
    with pytest.raises(ValueError, match="one process; received 2 with 3"):
        config.check_num_groups(3)
    for other in ("codistillation.include_past=0.5", "checkpoints=best"):
        with pytest.raises(ValueError, match=other.partition("=")[0]):
            _config(_STUDENTS, other)
    assert students.learns(config, tfdistill.Cluster())
