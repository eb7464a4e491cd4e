"""Two workers on two parameter servers: nothing is lost or counted twice."""

import json

import numpy as np
import pytest

from tests.programs import commands
from tests.programs import server_group_workers as program

pytestmark = pytest.mark.multiprocess
MEAN_LABEL = (program.NUM_EXAMPLES - 1) / 2


def _seen(directory, *names):
    """Runs parts of the program; returns what was seen in one."""
    commands.launched(
        *(directory / "run", program, directory, *names),
        workers_per_group=2,
        ps_per_group=2,
    )
    notes = json.loads((directory / "notes.json").read_text())

    def part(name):
        assert name not in notes["failed"], notes["failed"][name]
        return notes[name]

    return part


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    directory = tmp_path_factory.mktemp("seen")
    return _seen(directory, "scheduled_steps", "finite_data")


@pytest.fixture(scope="module")
def wrong(tmp_path_factory):
    return _seen(tmp_path_factory.mktemp("wrong"), "errors", "nan")


@pytest.mark.slow("trainings of a group of four")
def test_scheduled_steps_count_exactly_and_no_update_is_lost(seen):
    found = seen("scheduled_steps")
    num_epochs, num_steps = program.NUM_EPOCHS, program.NUM_STEPS
    assert found["iterations"] == num_epochs * num_steps == 600
    counts = found["history"]["count"]
    assert counts == [num_steps * program.BATCH_SIZE] * num_epochs
    expected = num_epochs * num_steps * program.RATE
    assert found["weight"] == expected
    assert found["table"] == [expected] + [0.0] * (program.NUM_IDS - 1)
    # Means are over the examples seen: a label is the index of the worker that
    # has read it.
    workers = np.reshape(found["workers"], [num_epochs, -1])
    assert workers.shape[1] == num_steps // program.STEPS_PER_EXECUTION
    assert set(found["workers"]) == {0, 1}
    np.testing.assert_allclose(
        found["history"]["label"], workers.mean(axis=1), rtol=1e-6
    )


def test_finite_data_are_read_once_an_epoch(seen):
    found = seen("finite_data")
    num_batches = -(-program.NUM_EXAMPLES // program.BATCH_SIZE)
    assert found["iterations"] == program.NUM_EPOCHS * num_batches
    for prefix in ("", "val_"):
        counts = found["history"][f"{prefix}count"]
        assert counts == [program.NUM_EXAMPLES] * program.NUM_EPOCHS
        means = found["history"][f"{prefix}label"]
        assert means == [MEAN_LABEL] * program.NUM_EPOCHS


def test_evaluation_counts_each_example_once_and_keeps_their_order(seen):
    part = seen("finite_data")
    for name in ("evaluated", "from_function", "of_words"):
        found = part[name]
        assert found["count"] == program.NUM_EXAMPLES
        assert found["label"] == MEAN_LABEL
        np.testing.assert_allclose(
            found["loss"], -np.mean(part["expected"]), rtol=1e-5
        )
    assert len(set(part["expected"])) == program.NUM_EXAMPLES
    np.testing.assert_allclose(part["predicted"], part["expected"], rtol=1e-6)


@pytest.mark.deep
def test_errors_surface_as_themselves_and_training_can_go_on(wrong):
    found = wrong("errors")
    for name, words in {
        "bad_record": "this record is damaged",
        "bad_ids": "",
        "bad_ids_evaluated": "",
    }.items():
        kind, message = found[name]
        assert kind == "InvalidArgumentError"
        words = words or (
            f"Ids of layer 'table_of_ids' must be >= 0 and < {program.NUM_IDS};"
            f" received {program.NUM_IDS + 7}"
        )
        assert words in message.replace("\\", "")
    for name in ("after_bad_record", "after_bad_ids"):
        assert found[name] == [10 * program.BATCH_SIZE]
    assert found["evaluated"]["count"] == program.NUM_EXAMPLES


@pytest.mark.deep
def test_a_loss_that_is_nan_ends_training(wrong):
    found = wrong("nan")
    assert found["is_nan"]
    assert found["epochs"] == [0]
    num_steps = program.NUM_NAN_STEPS
    assert num_steps < found["iterations"] < 10 * num_steps
