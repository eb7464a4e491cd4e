"""What a version must answer before it teaches, and how well."""

import types

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

_SPEC = tf.TensorSpec([None, 3])


def _check(outputs):
    batch = canary_lib.Canary((np.zeros([2, 4]), None))
    return batch.check(lambda inputs: [outputs], _SPEC)


def _merit(labels, **kwargs):
    """What compares versions with a student by these labels."""
    inputs = np.zeros([len(labels), cases.NUM_FEATURES])
    canary = canary_lib.Canary((inputs, labels))
    graph = student_graph.StudentGraph(cases.linear(0), cases.input_spec())
    known = teacher.Student(graph, tf.distribute.get_strategy(), **kwargs)
    return merit.Merit(canary, known)


def _loss(outputs, labels, *, from_logits=True):
    loss = types.SimpleNamespace(from_logits=from_logits)
    found = _merit(np.array(labels), losses=[loss])
    return found._yardstick.losses([tf.constant(outputs)]).mean()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_bad_number_is_enough(bad):
    outputs = np.zeros([2, 3])
    np.testing.assert_array_equal(_check(outputs)[0], outputs)
    outputs[1, 2] = bad
    with pytest.raises(ValueError, match="must be finite"):
        _check(outputs)


@pytest.mark.parametrize("shape", [[2, 1], [3, 3]])
def test_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match=r"shape \(2, 3\); received"):
        _check(np.zeros(shape))


def test_logits_probabilities_and_one_output_have_the_same_loss():
    probabilities = np.array([[0.01, 0.01, 0.98]] * 2)
    for labels, expected in ([2, 2], 0.98), ([0, 0], 0.01):
        loss = _loss(probabilities, labels, from_logits=False)
        assert loss == pytest.approx(-np.log(expected))
        loss = _loss(np.log(probabilities), labels)
        assert loss == pytest.approx(-np.log(expected))
    for outputs, from_logits in ([[0.98]] * 2, False), ([[3.8918]] * 2, True):
        loss = _loss(outputs, [1, 1], from_logits=from_logits)
        assert loss == pytest.approx(-np.log(0.98), rel=1e-3)


@pytest.mark.parametrize(
    ("targets", "labels"),
    [
        ([[1.0], [0.0], [1.0]], [1, 0, 1]),
        ([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]], [1, 0, 1]),
        ([[0.5, 0.5], [1.0, 0.0], [0.0, 1.0]], None),
        ({"a": [1, 2, 3], "b": [1, 2, 3]}, None),
    ],
)
def test_a_data_set_gives_its_first_examples(targets, labels):
    data = tf.data.Dataset.from_tensor_slices((np.eye(3), targets)).batch(2)
    found = canary_lib.Canary(data)
    np.testing.assert_array_equal(found.inputs, np.eye(3))
    np.testing.assert_equal(
        canary_lib.labels_of(found.targets), labels and np.array(labels)
    )


@pytest.mark.parametrize(
    ("student", "teacher", "is_worse"),
    [
        # Measured on digits, held-out rows: honest, half of the labels
        # rotated, all rotated, learning rate 0; early and late.
        (0.94, 0.89, False),
        (0.20, 0.18, False),
        (0.20, 1.09, True),
        (0.20, 2.4, True),
        # The student knows nothing yet: only what is wrong is told apart.
        (2.35, 2.5, False),
        (2.35, 7.5, True),
    ],
)
def test_a_version_needs_most_of_the_students_skill(student, teacher, is_worse):
    noise = np.random.default_rng(0).normal(scale=0.3, size=256)
    own, theirs = np.full(256, student), teacher + noise
    assert merit.is_worse(theirs, own, np.log(10)) == is_worse


def test_small_skills_need_more_than_chance_to_be_told_apart():
    """Of clicks: base rates save nothing, and an honest peer a bit less."""
    noise = np.random.default_rng(0).normal(scale=0.3, size=1024)
    noise -= noise.mean()
    own = np.full(1024, 0.44)
    for theirs, is_worse in (0.46, False), (0.51, True):
        assert merit.is_worse(theirs + noise, own, 0.52) == is_worse


def test_numbers_are_compared_with_their_mean():
    targets = np.linspace(-1, 1, 64)
    loss = keras.losses.MeanSquaredError()
    student = types.SimpleNamespace(from_logits=True, regression=loss)
    outputs = [tf.constant(targets[:, np.newaxis])]
    found = canary_lib.Yardstick(targets, student, outputs)
    np.testing.assert_allclose(found.base, np.var(targets))
    for error, is_worse in (0.1, False), (0.5, True):
        losses = found.losses([outputs[0] + error])
        np.testing.assert_allclose(losses, np.full(64, error**2))
        assert merit.is_worse(losses, np.zeros(64), found.base) == is_worse


def test_one_bad_version_of_a_good_peer_is_forgiven_at_once():
    labels = np.arange(30) % 3
    found = _merit(labels)
    found._own = lambda: np.full(30, 0.2)

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
    found._own = lambda: np.full(30, 0.5)
    found.check("group_1", weak)
    found._own = lambda: np.full(30, 0.1)
    with pytest.raises(screen.Refused):
        found.check("group_1", weak)
    assert "group_1" in found.outgrown
    found.check("group_1", [tf.one_hot(labels, 3, 5.0, 0.0)])
    assert not found.outgrown


def test_labels_that_do_not_fit_compare_nothing(caplog):
    """Of a regression, or padded: no version is at fault."""
    found = _merit(np.array([0, 7, -1]))
    for _ in range(2):
        found.take()
        found.check("group_1", [tf.zeros([3, 3])])
    assert caplog.text.count("from -1 to 7") == 1


def test_validation_data_that_cannot_be_looked_at_give_no_canary():
    assert canary_lib.of_validation(lambda context: None) is None
    assert canary_lib.of_validation(tf.data.Dataset.range(0)) is None
    lists = [[np.zeros([3, 2]), np.zeros([3, 1])], np.arange(3)]
    assert canary_lib.of_validation(lists).num_examples == 3
