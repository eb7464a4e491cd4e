"""The click recipe on real data: two groups, each with parameter servers."""

import json

import keras
import keras_rs  # noqa: F401 - has Keras find the layers of a DLRM's file.
import numpy as np
import pytest

import tfdistill
from launch import local
from tests.cases import runs

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.data,
    pytest.mark.usefixtures("no_process_left"),
]
NUM_STEPS = 300
# On a busy machine one group may be ten times as fast as the other, and done
# before that has published anything that is not worse than its own student. So
# each waits in its second half for a version from which it may learn.
RECIPE = f"""
import dataclasses
import time

import keras

from models import criteo


class Patience(keras.callbacks.Callback):
    num_left = 200

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) <= {NUM_STEPS // 2}:
            return
        (teacher,) = self.model.teachers.status()
        if self.num_left and teacher["health"] != "good":
            self.num_left -= 1
            time.sleep(3)


def workload(**others):
    return dataclasses.replace(
        criteo.small(**others), callbacks=lambda: [Patience()]
    )
"""


def test_two_groups_on_parameter_servers_learn_from_each_other(
    data_dir, tmp_path
):
    (path,) = (data_dir / "criteo").glob("*.tsv")
    recipe = tmp_path / "patient.py"
    recipe.write_text(RECIPE)
    code = local.main(
        [
            f"--workdir={tmp_path}",
            *("--num_groups=2", "--workers_per_group=1", "--ps_per_group=1"),
            f"--recipe={recipe}",
            f"--override=data.path={path}",
            f"--override=num_steps={NUM_STEPS}",
            f"--override=evaluate_every_steps={NUM_STEPS // 2}",
            "--override=start_together_secs=600",
            "--override=exchange.every_steps=20",
            "--override=codistillation.burn_in_steps=5",
            "--override=codistillation.ramp_steps=0",
        ]
    )
    assert code == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert [group["steps"] for group in results["groups"]] == [NUM_STEPS] * 2
    for group in range(2):
        # Better than to predict the share of clicks for all.
        metrics = results["groups"][group]["metrics"]
        assert metrics["normalized_entropy"] < 1 and metrics["auc"] > 0.5
        _check_group(tmp_path, group)


def test_a_dlrm_trains_on_a_worker_and_a_server(data_dir, tmp_path):
    (path,) = (data_dir / "criteo").glob("*.tsv")
    code = local.main(
        [
            f"--workdir={tmp_path}",
            *("--num_groups=1", "--workers_per_group=1", "--ps_per_group=1"),
            "--recipe=criteo_dlrm",
            f"--override=data.path={path}",
            "--override=data.arguments.field_sizes=500",
            *("--override=num_steps=20", "--override=evaluate_every_steps=20"),
        ]
    )
    assert code == 0
    student = keras.models.load_model(tmp_path / "group_0" / "student.keras")
    assert student.get_layer("products").output.shape == (None, 27 * 26 // 2)


def _check_group(workdir, group):
    lines = runs.records(workdir / f"group_{group}")
    assert lines[-1]["event"] == "end" and lines[-1]["step"] == NUM_STEPS
    ends = [line for line in lines if line.get("event") == "epoch_end"]
    assert [line["step"] for line in ends] == [NUM_STEPS // 2, NUM_STEPS]
    # The peer's versions came while training ran, and were learned from: the
    # mean of the second half has steps that had a teacher.
    steps = [line["teachers"][0]["step"] for line in lines]
    assert steps == sorted(steps) and steps[-1] > 0
    # Of a peer that is slow, an early version may be worse than the student.
    for line in lines:
        for why in line["teachers"][0]["quarantined"].values():
            assert "worse than the student" in why
    assert ends[-1]["distillation_loss"] > 0
    exchange = tfdistill.Exchange(workdir / "exchange")
    newest = exchange.latest(group)
    exchange.verify(newest)
    assert newest.step == NUM_STEPS
    student = keras.models.load_model(
        workdir / f"group_{group}" / "student.keras",
        custom_objects={"ShardedEmbedding": tfdistill.layers.ShardedEmbedding},
    )
    weights = [np.isfinite(w).all() for w in student.get_weights()]
    assert weights and all(weights)
