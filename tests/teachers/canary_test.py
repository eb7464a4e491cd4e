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


_LABELS = np.arange(30) % 3


def _check_loss(found, loss, step=10):
    """Checks a version that gives each label the probability of this loss."""
    right = np.log(2 / (np.exp(loss) - 1))
    outputs = [tf.one_hot(_LABELS, 3, float(right), 0.0)]
    found.check("group_1", outputs, step=step)


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
    found = _merit(_LABELS)
    found.note(10, np.full(30, 0.2), np.log(3))
    _check_loss(found, 0.2)
    _check_loss(found, 0.35)  # For the first time, after a good one.
    with pytest.raises(screen.Refused, match="clearly worse"):
        _check_loss(found, 1.0)
    _check_loss(found, 0.2)
    # Whom nobody has compared with anything is not worse.
    found.forget()
    _check_loss(found, 9.0)


def test_versions_are_compared_with_the_student_of_their_own_step():
    for step, loss, is_good in (
        (20, 0.55, True),
        # What the student has by now is no measure of it.
        (10, 0.58, True),
        (20, 0.8, False),
        # It falls steeply from there.
        (0, 2.0, True),
        # Of a step to come: what the student has now.
        (30, 0.54, True),
        (30, 0.8, False),
    ):
        found = _merit(_LABELS)
        for own_step, own in ((0, 1.0), (10, 0.57), (20, 0.53)):
            found.note(own_step, np.full(30, own), 0.75)
        try:
            _check_loss(found, loss, step=step)
        except screen.Refused as error:
            assert not is_good, (step, loss)
            assert "loss is 0.8" in str(error)
            assert "student's at step 20, 0.53" in str(error)
        else:
            assert is_good, (step, loss)


def test_the_student_is_looked_at_once_for_each_step():
    found = _merit(_LABELS)
    found.take(7)
    found.look()
    ((step, losses, base),) = found._own
    expected = keras.losses.sparse_categorical_crossentropy(
        _LABELS, cases.linear(0)(found._inputs), from_logits=True
    )
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    assert (step, base) == (7, pytest.approx(np.mean(expected)))
    found.take(9)
    for _ in range(2):
        found.look()
    assert [step for step, *_ in found._own] == [7, 9]


def test_a_version_that_the_student_has_outgrown_is_on_trial():
    found = _merit(_LABELS)
    found.note(10, np.full(30, 0.5), np.log(3))
    _check_loss(found, 0.55)
    found.note(20, np.full(30, 0.1), np.log(3))
    with pytest.raises(screen.Refused):
        _check_loss(found, 0.55, step=20)
    assert "group_1" in found.outgrown
    _check_loss(found, 0.01, step=20)
    assert not found.outgrown


def test_labels_that_do_not_fit_compare_nothing(caplog):
    """Padded, say: no version is at fault."""
    found = _merit(np.array([0, 7, -1]))
    for _ in range(2):
        found.take()
        found.check("group_1", [tf.zeros([3, 3])], step=0)
    assert not found.can_compare
    assert caplog.text.count("Versions are not compared") == 1


def test_validation_data_that_cannot_be_looked_at_give_no_canary():
    assert canary_lib.of_validation(lambda context: None) is None
    assert canary_lib.of_validation(tf.data.Dataset.range(0)) is None
    lists = [[np.zeros([3, 2]), np.zeros([3, 1])], np.arange(3)]
    assert canary_lib.of_validation(lists).num_examples == 3
