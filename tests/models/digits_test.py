"""Tests of the digits: their split and their model."""

import keras
import numpy as np
import tensorflow as tf
from sklearn import datasets
from sklearn import model_selection

from models import digits


def test_the_split_is_that_of_scikit_learn():
    loaded = datasets.load_digits()
    x_train, x_test, y_train, y_test = model_selection.train_test_split(
        (loaded.images / 16).astype(np.float32),
        loaded.target,
        test_size=500,
        random_state=0,
        stratify=loaded.target,
    )
    expected = x_train, y_train, x_test, y_test
    for found, array in zip(sum(digits.load(), ()), expected, strict=True):
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)


def test_model_shapes():
    model = digits.build_model(hidden_sizes=(32, 16, 8))
    dense = [x for x in model.layers if isinstance(x, keras.layers.Dense)]
    assert [layer.units for layer in dense] == [32, 16, 8, 10]
    keras.config.set_dtype_policy("mixed_bfloat16")
    logits = digits.build_model()(np.zeros((2, 8, 8), np.float32))
    assert logits.shape == (2, 10)
    assert logits.dtype == tf.float32
