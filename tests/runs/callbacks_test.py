"""Keras' ordinary callbacks on two real workers, which end apart."""

import json

import keras
import numpy as np
import pytest

from tests.cases import training as training_cases
from tests.programs import callback as callback_program
from tests.programs import commands

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.usefixtures("no_process_left"),
]


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    """What each of two workers noted, where their files are, what one said."""
    directory = tmp_path_factory.mktemp("callbacks")
    # The last line of the program is an error.
    commands.launched(
        directory / "run",
        callback_program,
        directory,
        workers_per_group=2,
        exit_code=1,
    )
    notes = [
        json.loads((directory / f"worker_{w}.json").read_text())
        for w in range(2)
    ]
    log = directory / "run" / "logs" / "group_0_worker_0.log"
    return directory, notes, log.read_text(errors="replace")


@pytest.mark.slow("two workers with a dozen callbacks")
def test_both_workers_see_the_same(workers):
    _, (first, second), _ = workers
    seen = ("history", "batches", "epochs", "rates", "weights", "prediction")
    seen += ("drawn",)
    for what in seen:
        assert first[what], what
        # As text, in which a NaN is like another.
        assert json.dumps(first[what]) == json.dumps(second[what]), what


def test_the_chief_is_warned_of_workers_that_read_other_batches(workers):
    _, _, said = workers
    assert said.count("`x` must give all workers the same batches") == 1
    assert "the first batches of worker 0 and worker 1 differ" in said


def test_what_a_callback_decides_on_one_worker_is_agreed_on_or_refused(workers):
    _, notes, said = workers
    first, second = (each["decided_alone"] for each in notes)
    assert first == second
    # Five batches an epoch; each epoch begins with the chief's rate.
    assert first["rate"][5:] == [0.01] * 5
    assert len(first["stop"]) == 7
    assert "worker 1 has other weights than worker 0" in first["weights"]
    assert "received 0.01, 0.02, by worker" in said


def test_rates_and_best_weights_are_of_the_callbacks(workers):
    _, (chief, other), _ = workers
    # Five batches an epoch; from the second on, the plateau halves it as well.
    rates = [0.25, 0.0625, 0.015625]
    assert chief["rates"] == [[r, 5 * n] for n, r in enumerate(rates, 1)]
    assert chief["monitored"] == [0, 1, 2]
    assert other["monitored"] == []


def test_only_the_chief_wrote_files(workers):
    _, (chief, other), _ = workers
    assert other["files"] == []
    names = chief["files"]
    assert "best.keras" in names
    assert "log.csv" in names
    assert "1.weights.h5" in names
    assert any(name.startswith("board/train/events") for name in names)
    assert any(name.startswith("board/validation/events") for name in names)


def test_what_the_chief_writes_is_there_when_fit_returns(workers):
    _, notes, _ = workers
    assert [each["saw_late_file"] for each in notes] == [True, True]


def test_the_checkpoint_is_the_plain_student(workers):
    directory, (notes, _), _ = workers
    student = keras.models.load_model(directory / "files_0" / "best.keras")
    # Early stopping restored the same best weights.
    for saved, kept in zip(
        student.get_weights(), notes["weights"], strict=True
    ):
        np.testing.assert_allclose(saved, kept, rtol=1e-6)
    x, _ = training_cases.regression(50)
    np.testing.assert_allclose(
        student.predict(x, verbose=0), notes["prediction"], atol=1e-6
    )


def test_a_prediction_by_the_chief_alone_is_refused_in_words(workers):
    _, _, said = workers
    assert "`predict` must be called by all workers" in said
    assert "while others ended their program" in said
    assert "Collective" not in said
