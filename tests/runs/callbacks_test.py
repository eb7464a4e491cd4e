"""Keras' ordinary callbacks on two real workers."""

import json
import math

import keras
import numpy as np
import pytest

from tests.cases import training as training_cases
from tests.programs import callback as callback_program
from tests.programs import commands
from tfdistill.launcher import local_cluster
from tfdistill.launcher import local_run

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout_secs(300)]


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    """What each of two workers noted, and where their files are."""
    directory = tmp_path_factory.mktemp("callbacks")
    topology = local_cluster.LocalCluster(
        command=commands.of(callback_program, directory),
        workdir=str(directory / "run"),
        workers_per_group=2,
    )
    with local_run.LocalRun(topology) as run:
        result = run.wait(timeout_secs=240)
    assert result.exit_code == 0, result.groups
    notes = [
        json.loads((directory / f"worker_{w}.json").read_text())
        for w in range(2)
    ]
    return directory, notes


def _same(one, other):
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        return all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        assert len(one) == len(other)
        return all(_same(a, b) for a, b in zip(one, other, strict=True))
    both_nan = isinstance(one, float) and math.isnan(one) and math.isnan(other)
    return one == other or both_nan


@pytest.mark.parametrize(
    "what",
    [
        "history",
        "batches",
        "epochs",
        "rates",
        "weights",
        "prediction",
        "averaged_losses",
        "averaged_batches",
    ],
)
def test_both_workers_see_the_same(workers, what):
    _, (first, second) = workers
    assert first[what], what
    assert _same(first[what], second[what])


def test_averages_schedules_and_nan_reach_all_workers(workers):
    _, (chief, other) = workers
    losses = chief["averaged_losses"]
    assert losses[1] < losses[0]
    assert chief["averaged_rate"] == pytest.approx(0.1 / 3)
    # Four batches twice, then four and the first that is not finite.
    assert chief["averaged_batches"] == [*range(4), *range(4), *range(5)]
    assert chief["monitored"] == [0, 0, 0]
    assert other["monitored"] == []


def test_only_the_chief_wrote_files(workers):
    _, (chief, other) = workers
    assert other["files"] == []
    names = chief["files"]
    assert "best.keras" in names
    assert "log.csv" in names
    assert "1.weights.h5" in names
    assert any(name.startswith("board/train/events") for name in names)
    assert any(name.startswith("board/validation/events") for name in names)


def test_the_checkpoint_is_the_plain_student(workers):
    directory, (notes, _) = workers
    student = keras.models.load_model(directory / "files_0" / "best.keras")
    # Early stopping restored the same best weights.
    for saved, restored in zip(
        student.get_weights(), notes["weights"], strict=True
    ):
        np.testing.assert_allclose(saved, restored, rtol=1e-6)
    x, _ = training_cases.regression(50)
    np.testing.assert_allclose(
        student.predict(x, verbose=0), notes["prediction"], atol=1e-6
    )
