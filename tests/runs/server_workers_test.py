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
def test_scheduled_steps_count_exactly(seen):
    found = seen("scheduled_steps")
    num_steps = program.NUM_EPOCHS * program.NUM_STEPS
    assert found["iterations"] == num_steps == 600
    assert (
        found["history"]["count"]
        == [program.NUM_STEPS * program.BATCH_SIZE] * program.NUM_EPOCHS
    )


def test_means_are_over_the_examples_seen(seen):
    found = seen("scheduled_steps")
    workers = np.reshape(found["workers"], [program.NUM_EPOCHS, -1])
    num_executions = program.NUM_STEPS // program.STEPS_PER_EXECUTION
    assert workers.shape[1] == num_executions
    assert set(found["workers"]) == {0, 1}
    # A label is the index of the worker that has read it.
    np.testing.assert_allclose(
        found["history"]["label"], workers.mean(axis=1), rtol=1e-6
    )


def test_no_update_is_lost(seen):
    found = seen("scheduled_steps")
    expected = program.NUM_EPOCHS * program.NUM_STEPS * program.RATE
    assert found["weight"] == expected
    assert found["table"] == [expected] + [0.0] * (program.NUM_IDS - 1)


def test_finite_data_are_read_once_an_epoch(seen):
    found = seen("finite_data")
    num_batches = -(-program.NUM_EXAMPLES // program.BATCH_SIZE)
    assert found["iterations"] == program.NUM_EPOCHS * num_batches
    for prefix in ("", "val_"):
        counts = found["history"][f"{prefix}count"]
        assert counts == [program.NUM_EXAMPLES] * program.NUM_EPOCHS
        means = found["history"][f"{prefix}label"]
        assert means == [MEAN_LABEL] * program.NUM_EPOCHS


@pytest.mark.parametrize("source", ["evaluated", "from_function"])
def test_evaluation_counts_each_example_once(seen, source):
    part = seen("finite_data")
    found = part[source]
    assert found["count"] == program.NUM_EXAMPLES
    assert found["label"] == MEAN_LABEL
    np.testing.assert_allclose(
        found["loss"], -np.mean(part["expected"]), rtol=1e-5
    )


def test_predictions_keep_the_order_of_the_data(seen):
    found = seen("finite_data")
    assert len(set(found["expected"])) == program.NUM_EXAMPLES
    np.testing.assert_allclose(found["predicted"], found["expected"], rtol=1e-6)


@pytest.mark.deep
def test_a_bad_record_surfaces_as_itself(wrong):
    found = wrong("errors")
    kind, message = found["bad_record"]
    assert kind == "InvalidArgumentError"
    assert "this record is damaged" in message
    assert found["after_bad_record"] == [10 * program.BATCH_SIZE]


@pytest.mark.deep
@pytest.mark.parametrize("name", ["bad_ids", "bad_ids_evaluated"])
def test_ids_out_of_range_name_their_layer(wrong, name):
    found = wrong("errors")
    kind, message = found[name]
    assert kind == "InvalidArgumentError"
    message = message.replace("\\", "")
    assert (
        f"Ids of layer 'table_of_ids' must be >= 0 and < {program.NUM_IDS}; "
        f"received {program.NUM_IDS + 7}" in message
    )
    assert found["after_bad_ids"] == [10 * program.BATCH_SIZE]
    assert found["evaluated"]["count"] == program.NUM_EXAMPLES


@pytest.mark.deep
def test_a_loss_that_is_nan_ends_training(wrong):
    found = wrong("nan")
    assert found["is_nan"]
    assert found["epochs"] == [0]
    assert program.NUM_NAN_STEPS < found["iterations"]
    assert found["iterations"] < 10 * program.NUM_NAN_STEPS
