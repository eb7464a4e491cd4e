"""Which examples a group reads, and in which order."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

from tests.cases import datasets as cases
from tfdistill import data

cluster = cases.cluster


def elements(dataset):
    return [np.asarray(element).tolist() for element in dataset]


@pytest.mark.parametrize("num_groups", [1, 2, 3])
def test_disjoint_parts_cover_all_of_the_data_once(num_groups):
    dataset = tf.data.Dataset.range(10)
    array = np.arange(10)
    parts = []
    for group in range(num_groups):
        here = cluster(group, num_groups)
        part = elements(data.group_shard(dataset, here))
        assert part == data.group_shard(array, here).tolist()
        parts += part
    assert sorted(parts) == list(range(10))


def test_shared_mode_gives_every_group_everything():
    dataset = tf.data.Dataset.range(5)
    for group in range(2):
        here = cluster(group)
        shared = data.group_shard(dataset, here, mode="shared")
        assert elements(shared) == [0, 1, 2, 3, 4]
        array = data.group_shard(np.arange(5), here, mode="shared")
        assert array.tolist() == [0, 1, 2, 3, 4]


def test_coordinated_groups_draw_the_same_batches_in_the_same_order():
    options = tf.data.Options()
    options.deterministic = False
    epochs = []
    for group in range(2):
        # Made again, as in another process: its orders depend on what was read.
        shuffled = tf.data.Dataset.range(20).shuffle(20, seed=3)
        part = data.group_shard(
            shuffled.with_options(options), cluster(group), mode="coordinated"
        )
        assert part.options().deterministic
        epochs.append([elements(part.batch(6)) for _ in range(2)])
    assert epochs[0] == epochs[1]
    assert sorted(sum(epochs[0][0], [])) == list(range(20))
    array = data.group_shard(np.arange(5), cluster(1), mode="coordinated")
    assert array.tolist() == [0, 1, 2, 3, 4]


def test_arrays_in_any_structure_keep_their_rows_together():
    arrays = ({"id": np.arange(7), "x": np.arange(14).reshape(7, 2)}, [[1] * 7])
    arrays[1][0] = np.arange(7) * 10
    features, labels = data.group_shard(arrays, cluster(1))
    assert features["id"].tolist() == [1, 3, 5]
    assert features["x"].tolist() == [[2, 3], [6, 7], [10, 11]]
    assert labels[0].tolist() == [10, 30, 50]


def test_a_group_without_data_is_refused():
    here = cluster(num_groups=3)
    with pytest.raises(ValueError, match="2 elements for 3 groups"):
        data.group_shard(tf.data.Dataset.range(20).batch(10), here)
    with pytest.raises(ValueError, match="2 elements for 3 groups"):
        data.group_shard(np.arange(2), here)


def test_a_shuffle_before_the_split_is_warned_of():
    shuffled = tf.data.Dataset.range(8).shuffle(8)
    for dataset in (shuffled, shuffled.map(tf.identity), shuffled.repeat()):
        with pytest.warns(UserWarning, match="group_shard.. first"):
            data.group_shard(dataset, cluster())
    fixed = tf.data.Dataset.range(8).shuffle(
        8, seed=1, reshuffle_each_iteration=False
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dataset in (fixed, tf.data.Dataset.range(8).repeat()):
            data.group_shard(dataset, cluster())
        data.group_shard(shuffled, cluster(), mode="shared")


def epochs(num_epochs, num_examples=20, **kwargs):
    indices = data.shuffled_indices(num_examples, **kwargs)
    flat = elements(indices.take(num_epochs * num_examples))
    return np.reshape(flat, (num_epochs, num_examples)).tolist()


def test_every_epoch_is_another_permutation():
    orders = epochs(3, seed=1)
    for order in orders:
        assert sorted(order) == list(range(20))
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_the_order_depends_on_seed_and_group_alone():
    expected = epochs(2, seed=1)
    tf.random.set_seed(99)
    assert epochs(2, seed=1) == expected
    assert epochs(2, seed=2) != expected
    assert epochs(2, seed=1, group=1) != expected
    resumed = data.shuffled_indices(20, seed=1, first=25).take(15)
    assert elements(resumed) == expected[1][5:]
    with pytest.raises(ValueError, match="received -1"):
        data.shuffled_indices(20, seed=1, first=-1)
