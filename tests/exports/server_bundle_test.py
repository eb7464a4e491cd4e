"""Tables in pieces, to and from one checkpoint."""

import numpy as np
import pytest
import tensorflow as tf

from tests.cases import codistillation as cases
from tfdistill.exports import quantized
from tfdistill.exports import server_bundle

DIM = 4


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    # Two rows a block, so that blocks end inside of shards and at their ends.
    monkeypatch.setattr("tfdistill.embedding.rows.BLOCK_ELEMENTS", 2 * DIM + 1)


def _table(num_rows=9):
    return np.arange(num_rows * DIM, dtype="float32").reshape(num_rows, DIM)


def _shards(*sizes, values=None, dtype="float32"):
    table = _table(sum(sizes)) if values is None else values
    shards, first = [], 0
    for index, size in enumerate(sizes):
        with tf.device(f"CPU:{index % 2}"):
            shards.append(
                tf.Variable(tf.cast(table[first : first + size], dtype))
            )
        first += size
    return shards


def _write(path, shards, **kwargs):
    bundle = server_bundle.BundleWriter(f"{path}/some")
    bundle.add({"dense": tf.constant([1.5, 2.5]), "step": tf.constant(7)})
    bundle.add({})
    bundle.add_rows("table", shards, **kwargs)
    bundle.finish()
    return f"{path}/some"


@pytest.mark.parametrize("sizes", [(9,), (1, 6, 2)])
def test_a_table_in_shards_is_one_tensor_of_an_ordinary_checkpoint(
    tmp_path, sizes
):
    reader = tf.train.load_checkpoint(_write(tmp_path, _shards(*sizes)))
    assert reader.get_variable_to_shape_map() == {
        "dense": [2],
        "step": [],
        "table": [9, DIM],
    }
    np.testing.assert_array_equal(reader.get_tensor("table"), _table())
    np.testing.assert_array_equal(reader.get_tensor("dense"), [1.5, 2.5])
    assert reader.get_tensor("step") == 7
    assert not list(tmp_path.glob("*.parts"))


@pytest.mark.parametrize("sizes", [(9,), (2, 2, 5)])
def test_it_reads_into_any_number_of_shards(tmp_path, sizes):
    prefix = _write(tmp_path, _shards(5, 4))
    shards = _shards(*sizes, values=np.zeros([9, DIM]))
    assert server_bundle.read_rows(prefix, "table", shards)
    found = np.concatenate([shard.numpy() for shard in shards])
    np.testing.assert_array_equal(found, _table())


def test_it_fills_one_half_of_each_shard(tmp_path):
    half = 1
    prefix = _write(tmp_path, _shards(5, 4))
    shards = _shards(10, 8, values=np.full([18, DIM], -1.0))
    assert server_bundle.read_rows(prefix, "table", shards, half=half)
    halves = [np.split(shard.numpy(), 2) for shard in shards]
    found = np.concatenate([both[half] for both in halves])
    np.testing.assert_array_equal(found, _table())
    assert all((both[1 - half] == -1).all() for both in halves)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_rows_are_quantized_and_widened_where_they_are(tmp_path, dtype):
    values = np.random.default_rng(0).normal(size=[9, DIM]).astype("float32")
    values[4] = 0.0
    key = "model_variables/0"
    form = quantized.Form(key, [9, DIM], tf.float32, dtype, by_row=True)
    bundle = server_bundle.BundleWriter(f"{tmp_path}/some")
    bundle.add_rows(key, _shards(5, 4, values=values), encode=form.encode)
    bundle.finish()
    reader = tf.train.load_checkpoint(f"{tmp_path}/some")
    for name, expected in form.encode(values).items():
        np.testing.assert_array_equal(reader.get_tensor(name), expected)
    shards = _shards(2, 7, values=np.zeros([9, DIM]))
    assert server_bundle.read_rows(f"{tmp_path}/some", key, shards)
    found = np.concatenate([shard.numpy() for shard in shards])
    rounded = cases.rounded(values, dtype, by_row=True)
    np.testing.assert_array_equal(found, rounded)


@pytest.mark.parametrize("row", [0, 8])
def test_it_tells_when_it_has_read_what_is_not_finite(tmp_path, row):
    table = _table()
    table[row, 1] = np.nan
    bundle = server_bundle.BundleWriter(f"{tmp_path}/some")
    bundle.add({"table": tf.constant(table)})
    bundle.finish()
    shards = _shards(5, 4)
    assert not server_bundle.read_rows(f"{tmp_path}/some", "table", shards)
