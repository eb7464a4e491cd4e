"""A group of one worker and two parameter servers, against one process.

One worker takes the steps in order, so every number must be that of one
process; what two workers do is in `server_group_workers_test.py`.
"""

import functools
import json
import pathlib
import tempfile

import numpy as np
import pytest
import tensorflow as tf

from tests.cases import references
from tests.cases import servers
from tests.cases import training as training_cases
from tests.programs import commands
from tests.programs import server_group as server_group_program

pytestmark = pytest.mark.multiprocess


class Found:
    """What the group found, case by case."""

    def __init__(self, directory):
        self.directory = directory
        self.notes = json.loads((directory / "notes.json").read_text())
        self._arrays = np.load(directory / "found.npz")

    def of(self, name):
        """Results of a case that did not fail."""
        assert name not in self.notes["failed"], self.notes["failed"][name]
        return training_cases.found_in(self._arrays, name)


@pytest.fixture(scope="module")
def found_in(tmp_path_factory):
    """Returns what the group found of a part."""

    @functools.cache
    def launched(part):
        directory = tmp_path_factory.mktemp(part)
        if part == "learn":
            servers.publish(directory)
        commands.launched(
            *(directory / "run", server_group_program, directory, part),
            ps_per_group=2,
        )
        return Found(directory)

    return launched


@pytest.fixture(scope="module")
def found(found_in):
    return found_in("learn")


def _learnt():
    """What one process learns from the same versions."""
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory)
        servers.publish(path)
        return servers.learn(path, tf.distribute.get_strategy())[0]


@pytest.mark.parametrize("name", training_cases.PLACES["servers"])
@pytest.mark.deep
def test_a_group_trains_as_one_process(found_in, name):
    expected = training_cases.reference(name)
    actual = found_in("cases").of(name)
    tolerance = training_cases.CASES[name].tolerance
    training_cases.assert_equal(actual, expected, tolerance)


@pytest.mark.slow("its reference, and the group")
def test_a_group_learns_from_a_peer_as_one_process_does(found):
    ours = found.of("learn")
    learnt = references.kept("servers-learn", _learnt)
    # The teacher counts from the first step after burn-in, ages by a step a
    # step, and is replaced after the first epoch.
    steps = np.arange(1, servers.NUM_EPOCHS + 1) * servers.NUM_STEPS - 1
    first, second = servers.VERSIONS
    np.testing.assert_array_equal(
        ours["log_teacher_staleness"], steps - [first, second, second]
    )
    np.testing.assert_allclose(ours["log_distillation_weight"], 0.7)
    assert (ours["log_distillation_loss"] > 0).all()
    assert ours.keys() == learnt.keys()
    for name, value in learnt.items():
        np.testing.assert_allclose(
            ours[name], value, rtol=2e-5, atol=2e-6, err_msg=name
        )


def test_a_swap_does_not_retrace_the_step(found):
    found.of("learn")
    # One execution of 5 steps and one of 2; none is traced after the first
    # epoch, though the version changes.
    assert found.notes["num_graphs"] == 2
    assert found.notes["num_traced"] == [servers.NUM_STEPS] * 3
