"""Where rows lie, and how they are written in place."""

import numpy as np
import pytest
import tensorflow as tf

from tfdistill.embedding import rows

SIZES = [1, 2, 3, 7, 10, 64, 1000, 1009]


def _layout(num_rows, **kwargs):
    return rows.RowLayout(num_rows, **kwargs)


@pytest.mark.parametrize("sharding", rows.SHARDINGS)
@pytest.mark.parametrize("num_rows", SIZES)
def test_each_id_has_a_row_of_its_own(num_rows, sharding):
    layout = _layout(num_rows, sharding=sharding)
    rows = layout.storage_rows(tf.range(num_rows)).numpy()
    assert sorted(rows) == list(range(num_rows))
    if sharding == "contiguous":
        assert list(rows) == list(range(num_rows))


@pytest.mark.parametrize("num_shards", [2, 3, 8])
def test_low_ids_are_spread_evenly_by_hash_alone(num_shards):
    ids = tf.range(400)
    layout = _layout(100_000, num_shards=num_shards)
    shards, _ = layout.split(layout.storage_rows(ids))
    counts = np.bincount(shards, minlength=num_shards)
    assert counts.max() - counts.min() <= 4
    layout = _layout(100_000, num_shards=num_shards, sharding="contiguous")
    shards, _ = layout.split(layout.storage_rows(ids))
    assert set(shards.numpy()) == {0}


def test_the_largest_hashed_table_does_not_overflow():
    layout = _layout(3_000_000_000)
    last = layout.num_rows - 1
    expected = last * layout.multiplier % layout.num_rows
    assert layout.storage_rows(tf.constant([last])).numpy()[0] == expected
