"""What the data sets of `models` have in common, for their tests."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tfdistill import data
from tfdistill.system import keras_internals


def cluster(group: int = 0, num_groups: int = 2) -> tfdistill.Cluster:
    return tfdistill.Cluster(group=group, num_groups=num_groups)


def read(dataset: tf.data.Dataset, num_batches: int = -1) -> list[Any]:
    return list(dataset.take(num_batches).as_numpy_iterator())


def joined(batches: list[Any]) -> Any:
    """The examples of batches, as one batch."""
    return keras.tree.map_structure(
        lambda *arrays: np.concatenate(arrays), *batches
    )


def assert_same(one: Any, other: Any) -> None:
    for a, b in zip(
        keras.tree.flatten(one), keras.tree.flatten(other), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def check_order(
    make: Callable[[int], tf.data.Dataset], *, num_batches: int
) -> None:
    """The order is that of the seed: on every worker, wherever it begins."""
    expected = read(make(3), num_batches)
    # Keras and a user set this one; it must not decide the order.
    for global_seed in (0, 77):
        tf.random.set_seed(global_seed)
        again = make(3)
        assert_same(read(again, num_batches), expected)
        for first in (1, num_batches - 1):
            resumed = data.from_batch(again, first)
            assert_same(read(resumed, num_batches - first), expected[first:])
        assert keras_internals.global_seed() == global_seed
    with pytest.raises(AssertionError):
        assert_same(read(make(4), num_batches), expected)
