"""The click recipe on real data: two groups, each with parameter servers."""

import json

import keras
import keras_rs  # noqa: F401 - has Keras find the layers of a DLRM's file.
import numpy as np
import pytest

import tfdistill
from launch import local

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.data,
    pytest.mark.timeout_secs(400),
    pytest.mark.usefixtures("no_process_left"),
]
NUM_STEPS = 300


def test_two_groups_on_parameter_servers_learn_from_each_other(
    data_dir, tmp_path
):
    (path,) = (data_dir / "criteo").glob("*.tsv")
    code = local.main(
        [
            f"--workdir={tmp_path}",
            *("--num_groups=2", "--workers_per_group=1", "--ps_per_group=1"),
            "--recipe=criteo_small",
            f"--override=data.path={path}",
            f"--override=num_steps={NUM_STEPS}",
            f"--override=evaluate_every_steps={NUM_STEPS // 2}",
            # So few steps may be over before the other group begins, or
            # before its second version, of which an export takes seconds: a
            # peer that is late is neither worse nor silent here.
            "--override=start_together_secs=60",
            "--override=exchange.every_steps=20",
            # Any version is one to learn from: where other work delays
            # exports, only early ones come before the end.
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
    text = (workdir / f"group_{group}" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert lines[-1]["event"] == "end" and lines[-1]["step"] == NUM_STEPS
    ends = [line for line in lines if line.get("event") == "epoch_end"]
    assert [line["step"] for line in ends] == [NUM_STEPS // 2, NUM_STEPS]
    # The peer's versions came while training ran, and were obeyed.
    steps = [line["teachers"][0]["step"] for line in lines]
    assert steps == sorted(steps) and steps[-1] > 0
    assert not any(line["teachers"][0]["quarantined"] for line in lines)
    assert lines[-1]["distillation_weight"] > 0
    assert lines[-1]["distillation_loss"] > 0
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
