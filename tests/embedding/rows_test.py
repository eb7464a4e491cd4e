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


@pytest.mark.parametrize("num_rows", SIZES)
@pytest.mark.parametrize("num_shards", [1, 2, 3, 7])
def test_shards_are_slices_of_nearly_one_size(num_rows, num_shards):
    if num_shards > num_rows:
        pytest.skip("refused, see below")
    layout = _layout(num_rows, num_shards=num_shards)
    sizes, starts = layout.shard_sizes, layout.starts
    assert sum(sizes) == num_rows
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1
    assert starts == [0, *np.cumsum(sizes)]
    rows = tf.range(num_rows, dtype=tf.int64)
    shards, local = layout.split(rows)
    assert shards.dtype == tf.int32
    assert local.dtype == tf.int32
    np.testing.assert_array_equal(np.array(starts)[shards] + local, rows)
    assert (local.numpy() < np.array(sizes)[shards]).all()
    assert (local.numpy() >= 0).all()


def test_the_stored_order_does_not_depend_on_the_shards():
    ids = tf.range(100)
    one = _layout(100).storage_rows(ids)
    five = _layout(100).with_shards(5)
    assert five.num_shards == 5
    np.testing.assert_array_equal(five.storage_rows(ids), one)


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


def test_ids_beyond_int32():
    num_rows = 5_000_000_007
    ids = np.array([0, 2**31, 2**32 + 5, num_rows - 1])
    for num_shards, dtype in ((7, tf.int32), (2, tf.int64)):
        layout = _layout(num_rows, sharding="contiguous", num_shards=num_shards)
        rows = layout.storage_rows(tf.constant(ids))
        np.testing.assert_array_equal(rows, ids)
        shards, local = layout.split(rows)
        assert local.dtype == dtype
        found = np.array(layout.starts)[shards] + local.numpy().astype("int64")
        np.testing.assert_array_equal(found, ids)


def test_the_largest_hashed_table_does_not_overflow():
    layout = _layout(3_000_000_000)
    last = layout.num_rows - 1
    expected = last * layout.multiplier % layout.num_rows
    assert layout.storage_rows(tf.constant([last])).numpy()[0] == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_rows": 0}, "`num_rows` must be >= 1; received 0"),
        ({"num_rows": 4, "num_shards": 5}, "at most.*4; received 5"),
        ({"num_rows": 4, "num_shards": 0}, "`num_shards` must be >= 1"),
        ({"num_rows": 4, "sharding": "mod"}, "'hash'.*received 'mod'"),
        ({"num_rows": 3_000_000_001}, 'Use sharding="contiguous"'),
    ],
)
def test_mistakes_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        rows.RowLayout(**arguments)
