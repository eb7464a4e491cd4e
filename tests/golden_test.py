"""Losses are what they were when tests/golden.json was written."""

import pytest
import tensorflow as tf

from tests import golden


@pytest.fixture(autouse=True, scope="module")
def _as_when_they_were_written():
    """Has TensorFlow rewrite graphs, which tests do without otherwise."""
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options(
        {"disable_meta_optimizer": False}
    )
    yield
    tf.config.optimizer.set_experimental_options(
        {"disable_meta_optimizer": before["disable_meta_optimizer"]}
    )


def _check(place, found):
    golden.assert_same(found, *golden.read(place))


def test_losses_on_one_device(tmp_path):
    strategy = tf.distribute.get_strategy()
    _check("one_device", golden.train("one_device", strategy, tmp_path))


def test_losses_on_two_replicas(two_replicas, tmp_path):
    _check("two_replicas", golden.train("two_replicas", two_replicas, tmp_path))
