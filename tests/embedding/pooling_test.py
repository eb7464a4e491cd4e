"""Bags that are summed where their rows are, against sums by NumPy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tfdistill.embedding import tables
from tfdistill.exports import student_graph

SIZE, DIM, NUM_SHARDS = 40, 4, 3
COMBINERS = ("sum", "mean", "sqrtn", "fm")


def _layer(size, combiner, *, device=None, **kwargs):
    kwargs = {"num_shards": NUM_SHARDS, "combine_on_servers": True, **kwargs}
    layer = tfdistill.layers.ShardedEmbedding(
        size,
        DIM,
        combiner=combiner,
        embeddings_initializer=keras.initializers.RandomUniform(seed=1),
        **kwargs,
    )
    with tf.device(device):
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


def _gradients(rows, combiner, upstream):
    """Of the rows `[k, dim]` of one bag, given that of what it gives."""
    if combiner == "fm":
        return upstream * (rows.sum(axis=0) - rows)
    divisor = {"sum": 1, "mean": len(rows), "sqrtn": len(rows) ** 0.5}
    return np.tile(upstream / max(divisor[combiner], 1), [len(rows), 1])


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
@pytest.mark.parametrize("there", [True, False], ids=["there", "here"])
def test_values_and_gradients_are_those_of_numpy(combiner, kind, there):
    ids, size, bags = _bags(combiner, kind)
    layer = _layer(size, combiner, combine_on_servers=there)
    table = _table(layer).astype("float64")
    rows = [table[np.array(bag, int)] for bag in bags]
    expected = np.stack([_pooled(each, combiner) for each in rows])
    dense = np.zeros_like(table)
    for bag, each, upstream in zip(
        bags, rows, 3 * np.cos(3 * expected), strict=True
    ):
        of_bag = _gradients(each, combiner, upstream)
        np.add.at(dense, np.array(bag, int), of_bag)
    with tf.GradientTape() as tape:
        found = layer(ids, training=True)
        loss = tf.reduce_sum(tf.sin(3 * found))
    slices = tape.gradient(loss, [shard.value for shard in layer.shards])
    assert all(len(set(s.indices.numpy())) == len(s.indices) for s in slices)
    stored = np.concatenate([tf.convert_to_tensor(s) for s in slices])
    order = layer.layout.storage_rows(np.arange(len(stored))).numpy()
    np.testing.assert_allclose(stored[order], dense, rtol=1e-5, atol=1e-6)
    for values in (found, layer(ids, training=False)):
        values = values.numpy().reshape(expected.shape)
        np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("combiner", "dtype"), [("mean", "mixed_bfloat16"), ("fm", "mixed_float16")]
)
def test_half_precision_comes_once_bags_are_combined(combiner, dtype):
    ids, size, bags = _bags(combiner, "ragged")
    for there in (True, False):
        layer = _layer(size, combiner, combine_on_servers=there, dtype=dtype)
        for shard in layer.shards:  # Squared, sums are beyond float16.
            shard.assign(40 * (1 + shard))
        expected = [
            _pooled(_table(layer)[np.array(bag, int)], combiner) for bag in bags
        ]
        with tf.GradientTape() as tape:
            found = layer(ids, training=True)
        slices = tape.gradient(found, [shard.value for shard in layer.shards])
        assert found.dtype == layer.compute_dtype
        np.testing.assert_allclose(
            tf.cast(found, tf.float32), expected, rtol=2e-2
        )
        assert {one.values.dtype for one in slices} == {tf.float32}


BATCH_SIZE = 8


class _Twice(keras.layers.Layer):
    """The mean of each bag, and of the same bags with other ids."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def call(self, ids):
        return self.table(ids) - self.table((ids + 1) % SIZE)


def _model(*, combine_on_servers, device=None, twice=False):
    """Bags whose mean is taken, and pairs of fields."""
    options = {"combine_on_servers": combine_on_servers, "device": device}
    bags = keras.Input((12,), dtype="int64", name="bags")
    ids = keras.Input((8,), dtype="int64", name="ids")
    means = _layer(SIZE, "mean", name="means", **options)
    pairs = _layer([5] * 8, "fm", name="pairs", **options)
    top = keras.layers.Dense(
        1, kernel_initializer=keras.initializers.GlorotUniform(seed=1)
    )
    vectors = _Twice(means)(bags) if twice else means(bags)
    student = keras.Model({"bags": bags, "ids": ids}, top(vectors) + pairs(ids))
    model = tfdistill.CodistillModel(student)
    model.compile(keras.optimizers.Adagrad(0.1, global_clipnorm=0.5), "mse")
    return model


def _tables(model):
    return {t.layer.name: _table(t) for t in tables.tables_of(model)}


def _data(num_examples):
    rng = np.random.default_rng(4)
    x = {
        "bags": rng.integers(0, SIZE, [num_examples, 12]),
        "ids": rng.integers(0, 5, [num_examples, 8]),
    }
    return x, np.sin(x["bags"].sum(axis=1, keepdims=True)).astype("float32")


def _trained(
    strategy=None, *, num_examples=80, epochs=5, eager=False, **kwargs
):
    """Trains, by default for 50 steps; returns the tables before and after."""
    with (strategy or tf.distribute.get_strategy()).scope():
        model = _model(**kwargs)
    model.run_eagerly = eager
    before = _tables(model)
    x, y = _data(num_examples)
    options = {"shuffle": False, "verbose": 0}
    model.fit(x, y, batch_size=BATCH_SIZE, epochs=epochs, **options)
    return before, _tables(model)


@pytest.mark.deep
def test_fifty_steps_of_adagrad_are_those_of_sums_on_workers():
    before, found = _trained(combine_on_servers=True)
    _, expected = _trained(combine_on_servers=False)
    for name, table in found.items():
        np.testing.assert_allclose(table, expected[name], rtol=0, atol=1e-6)
        assert np.abs(table - before[name]).max() > 1e-2


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.deep
def test_any_step_trains_as_with_sums_on_workers(eager, two_replicas):
    options = {"num_examples": 16, "epochs": 2, "twice": True, "eager": eager}
    _, expected = _trained(combine_on_servers=False, **options)
    strategy = None if eager else two_replicas
    _, found = _trained(strategy, combine_on_servers=True, **options)
    for name, table in found.items():
        np.testing.assert_allclose(table, expected[name], rtol=0, atol=1e-6)


def test_a_teacher_may_have_combined_elsewhere():
    spec = {
        "bags": tf.TensorSpec([None, 12], tf.int64),
        "ids": tf.TensorSpec([None, 8], tf.int64),
    }
    there, here = (
        student_graph.StudentGraph(_model(combine_on_servers=on).student, spec)
        for on in (True, False)
    )
    assert there.fingerprint == here.fingerprint


def _crossing(graph, far):
    """What goes to the far device, and from it: dtypes and shapes.

    Without scalars. An operation on a variable is where that is.
    """
    own = {id(placed): given.device for given, placed in graph.captures}
    is_far = {}
    for op in graph.get_operations():
        handles = [own[id(i)] for i in op.inputs if i.dtype == tf.resource]
        is_far[op] = far in (handles or [op.device])[0]
    return {
        (is_far[op], tensor.dtype, tuple(tensor.shape))
        for op in is_far
        for tensor in op.inputs
        if is_far[op] != is_far[tensor.op] and tensor.shape.rank
    }


@pytest.mark.deep
def test_rows_and_their_gradients_stay_on_the_device_of_a_shard():
    far = tf.config.list_logical_devices("CPU")[1].name
    model = _model(combine_on_servers=True, device=far)
    x, y = _data(BATCH_SIZE)
    model.fit(x, y, verbose=0)
    step = tf.function(model.train_step).get_concrete_function(
        (tf.nest.map_structure(tf.constant, x), tf.constant(y))
    )
    sums = [(BATCH_SIZE, DIM), (BATCH_SIZE, DIM + 1)]
    assert _crossing(step.graph, far) == {
        *((True, tf.int32, shape) for shape in [(None,), (BATCH_SIZE,)]),
        *((True, tf.float32, shape) for shape in sums),
        *((False, tf.float32, shape) for shape in sums),
    }


def test_it_warns_where_it_would_send_more():
    layer = _layer(SIZE, "sum")
    # 2 ids: 8 bytes, and 36 for each of 3 shards; their rows: 72.
    with pytest.warns(UserWarning, match="needs 116 bytes from 3 shards.* 72"):
        found = layer(tf.constant([[1, 2]]))
    expected = _table(layer)[[1, 2]].sum(axis=0)
    np.testing.assert_allclose(found[0], expected, rtol=1e-6)
    with pytest.raises(ValueError, match="must come with a `combiner`"):
        _layer(SIZE, None)
    # In one piece nothing travels.
    alone = _layer(SIZE, "sum", num_shards=1)
    assert alone(tf.constant([[1, 2]])).shape == (1, DIM)
    again = type(layer).from_config(layer.get_config())
    assert again.combine_on_servers
