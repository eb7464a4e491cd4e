"""What a version must answer before it teaches."""

import numpy as np
import pytest
import tensorflow as tf

from tfdistill.teachers import canary as canary_lib

_SPEC = tf.TensorSpec([None, 3])


def _check(outputs):
    batch = canary_lib.Canary((np.zeros([2, 4]), None))
    return batch.check(lambda inputs: [outputs], _SPEC)


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


def test_validation_data_that_cannot_be_looked_at_give_no_canary():
    assert canary_lib.of_validation(lambda context: None) is None
    assert canary_lib.of_validation(tf.data.Dataset.range(0)) is None
    lists = [[np.zeros([3, 2]), np.zeros([3, 1])], np.arange(3)]
    assert canary_lib.of_validation(lists).num_examples == 3
