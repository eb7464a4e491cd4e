"""Tests of the digits: their split and their model."""

import keras
import numpy as np
import tensorflow as tf

from models import digits


def rows(images):
    return {image.tobytes() for image in np.asarray(images)}


def test_splits_are_stratified_fixed_and_disjoint():
    (x_train, y_train), (x_test, y_test) = digits.load()
    assert x_train.shape == (1297, 8, 8)
    assert x_test.shape == (500, 8, 8)
    assert (x_train.dtype, y_train.dtype) == (np.float32, np.int64)
    assert (x_train.min(), x_train.max()) == (0.0, 1.0)
    for labels in (y_train, y_test):
        counts = np.bincount(labels, minlength=10) / len(labels)
        np.testing.assert_allclose(counts, 0.1, atol=0.01)
    assert not rows(x_train) & rows(x_test)
    np.testing.assert_array_equal(digits.load()[1][0], x_test)


def test_model_shapes():
    model = digits.build_model(hidden_sizes=(32, 16, 8))
    dense = [x for x in model.layers if isinstance(x, keras.layers.Dense)]
    assert [layer.units for layer in dense] == [32, 16, 8, 10]
    keras.config.set_dtype_policy("mixed_bfloat16")
    logits = digits.build_model()(np.zeros((2, 8, 8), np.float32))
    assert logits.shape == (2, 10)
    assert logits.dtype == tf.float32
