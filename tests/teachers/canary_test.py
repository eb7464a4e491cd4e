"""What a version must answer before it teaches, and how well."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.cases import codistillation as cases
from tfdistill.exports import student_graph
from tfdistill.follow import screen
from tfdistill.teachers import canary as canary_lib
from tfdistill.teachers import merit
from tfdistill.teachers import teacher
from tfdistill.teachers import yardstick

_SPEC = tf.TensorSpec([None, 3])


def _check(outputs):
    batch = canary_lib.Canary((np.zeros([2, 4]), None))
    return batch.check(lambda inputs: [outputs], _SPEC)


def _merit(labels):
    """What compares versions with a student by these labels."""
    inputs = np.zeros([len(labels), cases.NUM_FEATURES])
    canary = canary_lib.Canary((inputs, labels))
    graph = student_graph.StudentGraph(cases.linear(0), cases.input_spec())
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    known = teacher.Student(
        graph,
        tf.distribute.get_strategy(),
        yardstick=yardstick.Yardstick(loss),
    )
    return merit.Merit(canary, known)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([[0, 0, 0], [0, 0, np.nan]], "must be finite"),
        ([[0, 0, 0], [0, 0, np.inf]], "must be finite"),
        (np.zeros([2, 1]), r"shape \(2, 3\); received"),
        (np.zeros([3, 3]), r"shape \(2, 3\); received"),
    ],
)
def test_answers_that_are_no_predictions_are_refused(outputs, message):
    good = np.zeros([2, 3])
    np.testing.assert_array_equal(_check(good)[0], good)
    with pytest.raises(ValueError, match=message):
        _check(np.array(outputs))


def test_a_data_set_gives_its_first_examples():
    targets = [[1.0], [0.0], [1.0]]
    data = tf.data.Dataset.from_tensor_slices((np.eye(3), targets)).batch(2)
    found = canary_lib.Canary(data)
    np.testing.assert_array_equal(found.inputs, np.eye(3))
    np.testing.assert_array_equal(found.targets, targets)


def test_one_bad_version_of_a_good_peer_is_forgiven_at_once():
    labels = np.arange(30) % 3
    found = _merit(labels)
    found._own = lambda: (np.full(30, 0.2), np.log(3))

    def check(loss):
        """A version that gives each label the probability of this loss."""
        right = np.log(2 / (np.exp(loss) - 1))
        found.check("group_1", [tf.one_hot(labels, 3, float(right), 0.0)])

    check(0.2)
    check(0.35)  # For the first time, after a good one.
    with pytest.raises(screen.Refused, match="clearly worse"):
        check(1.0)
    check(0.2)
    # Whom nobody has compared with anything is not worse.
    found.forget()
    check(9.0)


def test_a_version_that_the_student_has_outgrown_is_on_trial():
    labels = np.arange(30) % 3
    found = _merit(labels)
    weak = [tf.one_hot(labels, 3, 1.0, 0.0)]
    found._own = lambda: (np.full(30, 0.5), np.log(3))
    found.check("group_1", weak)
    found._own = lambda: (np.full(30, 0.1), np.log(3))
    with pytest.raises(screen.Refused):
        found.check("group_1", weak)
    assert "group_1" in found.outgrown
    found.check("group_1", [tf.one_hot(labels, 3, 5.0, 0.0)])
    assert not found.outgrown


def test_labels_that_do_not_fit_compare_nothing(caplog):
    """Padded, say: no version is at fault."""
    found = _merit(np.array([0, 7, -1]))
    for _ in range(2):
        found.take()
        found.check("group_1", [tf.zeros([3, 3])])
    assert not found.can_compare
    assert caplog.text.count("Versions are not compared") == 1


def test_validation_data_that_cannot_be_looked_at_give_no_canary():
    assert canary_lib.of_validation(lambda context: None) is None
    assert canary_lib.of_validation(tf.data.Dataset.range(0)) is None
    lists = [[np.zeros([3, 2]), np.zeros([3, 1])], np.arange(3)]
    assert canary_lib.of_validation(lists).num_examples == 3
