"""What a version must answer before it teaches, and how well."""

import types

import numpy as np
import pytest
import tensorflow as tf

from tfdistill.teachers import canary as canary_lib
from tfdistill.teachers import merit

_SPEC = tf.TensorSpec([None, 3])


def _student(spec=_SPEC, *, from_logits=True):
    graph = types.SimpleNamespace(output_spec=spec)
    return types.SimpleNamespace(graph=graph, from_logits=from_logits)


def _check(outputs, spec=_SPEC, labels=None, from_logits=True):
    rows = (np.zeros([2, 4]), None if labels is None else np.array(labels))
    batch = canary_lib.Canary(rows)
    student = _student(spec, from_logits=from_logits)
    return batch.check(lambda inputs: [outputs], student)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_bad_number_is_enough(bad):
    outputs = np.zeros([2, 3])
    assert _check(outputs) is None
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
        loss = _check(probabilities, labels=labels, from_logits=False)
        assert loss == pytest.approx(-np.log(expected))
        loss = _check(np.log(probabilities), labels=labels)
        assert loss == pytest.approx(-np.log(expected))
    spec = tf.TensorSpec([None, 1])
    for outputs, from_logits in ([[0.98]] * 2, False), ([[3.8918]] * 2, True):
        loss = _check(
            np.array(outputs), spec, labels=[1, 1], from_logits=from_logits
        )
        assert loss == pytest.approx(-np.log(0.98), rel=1e-3)


@pytest.mark.parametrize(
    ("targets", "labels"),
    [
        ([[1.0], [0.0], [1.0]], [[1], [0], [1]]),
        ([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]], [1, 0, 1]),
        ([[0.5, 0.5], [1.0, 0.0], [0.0, 1.0]], None),
        ({"a": [1, 2, 3], "b": [1, 2, 3]}, None),
    ],
)
def test_a_data_set_gives_its_first_examples(targets, labels):
    data = tf.data.Dataset.from_tensor_slices((np.eye(3), targets)).batch(2)
    found = canary_lib.Canary(data)
    np.testing.assert_array_equal(found.inputs, np.eye(3))
    np.testing.assert_equal(found.labels, labels and np.array(labels))


def _is_worse(loss, own, before=None):
    labels = np.arange(100) % 10
    canary = canary_lib.Canary((np.zeros([100, 4]), labels))
    return merit.is_worse(canary, loss, own, before)


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
    assert _is_worse(teacher, student) == is_worse


def test_one_bad_version_of_a_good_peer_is_forgiven_at_once():
    assert not _is_worse(1.0, 0.2, before=0.2)
    assert _is_worse(1.0, 0.2, before=0.9)
    assert not _is_worse(0.2, 0.2, before=5.0)


def test_labels_that_do_not_fit_compare_nothing(caplog):
    """Of a regression, or padded: no version is at fault."""
    batch = canary_lib.of_validation((np.zeros([3, 2]), np.array([0, 7, -1])))
    for _ in range(2):
        found = batch.check(lambda inputs: [tf.zeros([3, 3])], _student())
        assert found is None
    assert caplog.text.count("from -1 to 7") == 1


def test_validation_data_that_cannot_be_looked_at_give_no_canary():
    assert canary_lib.of_validation(lambda context: None) is None
    assert canary_lib.of_validation(tf.data.Dataset.range(0)) is None
    lists = [[np.zeros([3, 2]), np.zeros([3, 1])], np.arange(3)]
    assert canary_lib.of_validation(lists).num_examples == 3
