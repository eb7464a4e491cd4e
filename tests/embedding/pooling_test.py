"""Bags that are summed where their rows are, against sums by NumPy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill

SIZE, DIM, NUM_SHARDS = 40, 4, 3
COMBINERS = ("sum", "mean", "sqrtn", "fm")


def _layer(size, combiner, **kwargs):
    kwargs = {"num_shards": NUM_SHARDS, "combine_on_servers": True, **kwargs}
    layer = tfdistill.layers.ShardedEmbedding(
        size,
        DIM,
        combiner=combiner,
        embeddings_initializer=keras.initializers.RandomUniform(seed=1),
        **kwargs,
    )
    layer.build()
    return layer


def _table(layer):
    """Rows by id."""
    stored = np.concatenate([shard.numpy() for shard in layer.shards])
    return stored[layer.layout.storage_rows(np.arange(len(stored))).numpy()]


def _pooled(rows, combiner):
    """What a combiner makes of the rows `[k, dim]` of one bag."""
    if combiner == "fm":
        products = rows @ rows.T
        return np.triu(products, 1).sum(keepdims=True)[0]
    divisor = {"sum": 1, "mean": len(rows), "sqrtn": len(rows) ** 0.5}
    return rows.sum(axis=0) / max(divisor[combiner], 1)


def _bags(combiner, kind):
    """Returns ids, their table's size, and the rows of each bag in it."""
    rng = np.random.default_rng(2)
    if kind == "ragged":
        bags = [[1, 2, 3, 1], [], [5, 5, 5, 7], [39], [0, 39, 2]]
        return tf.ragged.constant(bags, tf.int64), SIZE, bags
    if kind == "dense":
        ids = rng.integers(0, 9, [5, 13])
        return tf.constant(ids), SIZE, ids
    sizes = [3] * 11
    offsets = np.arange(11) * 3
    if combiner == "fm":  # One id of each field.
        ids = rng.integers(0, 3, [5, 11])
        return tf.constant(ids), sizes, ids + offsets
    ids = rng.integers(0, 3, [5, 11, 12])
    in_table = ids + offsets[:, np.newaxis]
    return tf.constant(ids), sizes, in_table.reshape(-1, 12)


@pytest.mark.parametrize("kind", ["dense", "ragged", "fields"])
@pytest.mark.parametrize("combiner", COMBINERS)
def test_values_are_those_of_numpy_and_gradients_those_of_rows(combiner, kind):
    ids, size, bags = _bags(combiner, kind)
    there = _layer(size, combiner)
    here = _layer(size, combiner, combine_on_servers=False)
    table = _table(there)
    expected = np.stack(
        [_pooled(table[np.array(bag, int)], combiner) for bag in bags]
    )
    gradients = []
    for layer in (there, here):
        shards = [shard.value for shard in layer.shards]
        with tf.GradientTape() as tape:
            found = layer(ids, training=True)
            loss = tf.reduce_sum(tf.sin(3 * found))
        slices = tape.gradient(loss, shards)
        assert all(
            len(set(s.indices.numpy())) == len(s.indices) for s in slices
        )
        gradients.append([tf.convert_to_tensor(s).numpy() for s in slices])
        values = found.numpy().reshape(expected.shape)
        np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6)
    for one, other in zip(*gradients, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        assert np.abs(one).max() > 1e-3
    inferred = there(ids, training=False).numpy().reshape(expected.shape)
    np.testing.assert_allclose(inferred, expected, rtol=1e-5, atol=1e-6)


def _trained(*, combine_on_servers):
    """Takes 50 steps of Adagrad; returns the tables."""
    options = {"combine_on_servers": combine_on_servers}
    bags = keras.Input((12,), dtype="int64", name="bags")
    ids = keras.Input((8,), dtype="int64", name="ids")
    tables = [_layer(SIZE, "mean", **options), _layer([5] * 8, "fm", **options)]
    top = keras.layers.Dense(
        1, kernel_initializer=keras.initializers.GlorotUniform(seed=1)
    )
    student = keras.Model(
        {"bags": bags, "ids": ids}, top(tables[0](bags)) + tables[1](ids)
    )
    model = tfdistill.CodistillModel(student)
    model.compile(keras.optimizers.Adagrad(0.1, global_clipnorm=0.5), "mse")
    rng = np.random.default_rng(4)
    x = {
        "bags": rng.integers(0, SIZE, [80, 12]),
        "ids": rng.integers(0, 5, [80, 8]),
    }
    y = np.sin(x["bags"].sum(axis=1, keepdims=True)).astype("float32")
    model.fit(x, y, batch_size=8, epochs=5, shuffle=False, verbose=0)
    return [_table(layer) for layer in tables]


def test_fifty_steps_of_adagrad_are_those_of_sums_on_workers():
    found = _trained(combine_on_servers=True)
    expected = _trained(combine_on_servers=False)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    assert np.abs(found[0] - _table(_layer(SIZE, "mean"))).max() > 1e-2


def test_it_is_refused_where_it_would_send_more():
    layer = _layer(SIZE, "sum")
    # 2 ids: 8 bytes, and 36 for each of 3 shards; their rows: 72.
    with pytest.raises(ValueError, match="needs 116 bytes from 3 shards.* 72"):
        layer(tf.constant([[1, 2]]))
    with pytest.raises(ValueError, match="must come with a `combiner`"):
        _layer(SIZE, None)
    # In one piece nothing travels.
    alone = _layer(SIZE, "sum", num_shards=1)
    assert alone(tf.constant([[1, 2]])).shape == (1, DIM)


def test_the_option_is_saved_with_the_layer():
    layer = _layer(SIZE, "sum")
    again = type(layer).from_config(layer.get_config())
    assert again.combine_on_servers
