"""Experiment trackers on two real workers: one run for their group."""

import json

import numpy as np
import pytest

from tests.programs import commands

pytestmark = [pytest.mark.deep, pytest.mark.multiprocess]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Where two workers left their files and notes."""
    found = tmp_path_factory.mktemp("trackers")
    patch = pytest.MonkeyPatch()
    patch.setenv("WANDB_MODE", "offline")
    for name in ("DATA", "CACHE", "CONFIG"):
        patch.setenv(f"WANDB_{name}_DIR", str(found / "home"))
    # In a new database two workers would be in each other's way.
    patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    patch.setenv("MLFLOW_TRACKING_URI", str(found / "mlflow"))
    commands.launched(
        *(found / "run", "tests.programs.trackers", found),
        cwd=found,  # Where MLflow puts its files.
        workers_per_group=2,
    )
    patch.undo()
    return found


@pytest.fixture(scope="module")
def notes(directory):
    return [
        json.loads((directory / f"worker_{w}.json").read_text())
        for w in range(2)
    ]


def test_mlflow_has_one_run_with_the_group_as_a_tag(directory):
    (tag,) = directory.glob("mlflow/*/*/tags/tfdistill.group")
    assert tag.read_text() == "group_0"
    run = tag.parent.parent
    assert list(run.parent.glob("*/meta.yaml")) == [run / "meta.yaml"]
    losses = (run / "metrics" / "loss").read_text().splitlines()
    assert [line.split()[2] for line in losses] == ["0", "1"]


def test_wandb_has_one_run_with_the_group_as_a_tag(directory):
    (run,) = directory.glob("wandb/offline-run-*")
    (data,) = run.glob("*.wandb")
    stored = data.read_bytes()
    assert b"group_0" in stored
    assert b"epoch/task_loss" in stored


def test_a_callback_of_the_chief_looks_without_the_other_worker(notes):
    chief, worker = notes
    assert chief["shape"] == [3, 1]
    assert not worker["shape"]


def test_arrays_are_shuffled_alike_without_a_seed(notes):
    for found in notes:
        np.testing.assert_allclose(*found["losses"], rtol=1e-5)
