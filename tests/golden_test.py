"""Losses are what they were when tests/golden.json was written."""

import pytest
import tensorflow as tf

from tests import golden


def _check(place, found):
    golden.assert_same(found, *golden.read(place))


def test_losses_on_one_device(tmp_path):
    strategy = tf.distribute.get_strategy()
    _check("one_device", golden.train("one_device", strategy, tmp_path))


def test_losses_on_two_replicas(two_replicas, tmp_path):
    _check("two_replicas", golden.train("two_replicas", two_replicas, tmp_path))


@pytest.mark.multiprocess
@pytest.mark.usefixtures("no_process_left")
@pytest.mark.parametrize("place", golden.LAUNCHED)
def test_losses_of_groups_in_processes(place, tmp_path):
    _check(place, golden.launch(place, tmp_path))
