"""The layer: lookups, first values, files, and its table as one variable."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as codistillation_cases
from tests.cases import embedding as cases
from tfdistill.exports import student_graph

LAYOUTS = [("hash", 3), ("contiguous", 1)]


def _uniform(seed=1):
    return keras.initializers.RandomUniform(seed=seed)


def _layer(input_dim=20, dim=3, **kwargs):
    kwargs.setdefault("embeddings_initializer", _uniform())
    layer = tfdistill.layers.ShardedEmbedding(input_dim, dim, **kwargs)
    layer.build()
    return layer


def _by_id(layer):
    """The table in the order of the ids."""
    order = layer.layout.storage_rows(tf.range(layer.layout.num_rows))
    return cases.table(layer)[order.numpy()]


@pytest.mark.parametrize(("sharding", "num_shards"), LAYOUTS)
@pytest.mark.parametrize("training", [None, True, False])
def test_each_id_gets_its_row(sharding, num_shards, training):
    layer = _layer(sharding=sharding, num_shards=num_shards)
    assert len(layer.shards) == num_shards
    for ids in (7, [3, 3, 19, 0], [[1, 2], [2, 1]], np.zeros([0, 4], "int32")):
        ids = tf.constant(ids, tf.int32)
        found = layer(ids, training=training)
        np.testing.assert_array_equal(found, _by_id(layer)[ids.numpy()])


@pytest.mark.parametrize(("sharding", "num_shards"), LAYOUTS)
def test_gradients_are_summed_per_id(sharding, num_shards):
    layer = _layer(sharding=sharding, num_shards=num_shards)
    ids = np.array([[3, 3, 19], [0, 3, 19]])
    upstream = np.random.default_rng(0).normal(size=(2, 3, 3)).astype("f4")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(ids) * upstream)
    gradients = tape.gradient(loss, layer.shards)
    dense = np.zeros((20, 3), "float32")
    for start, slices in zip(layer.layout.starts, gradients, strict=False):
        assert isinstance(slices, tf.IndexedSlices)
        rows = slices.indices.numpy() + start
        assert len(set(rows)) == len(rows)
        dense[rows] = slices.values
    expected = np.zeros((20, 3), "float32")
    np.add.at(expected, layer.layout.storage_rows(ids).numpy(), upstream)
    np.testing.assert_allclose(dense, expected, rtol=1e-6)
    assert sum(len(g.indices) for g in gradients) == 3


BAGS = [[5, 7, 5], [], [1], [2, 7]]


def test_ragged_inputs_of_a_functional_model():
    inputs = keras.Input((None,), dtype="int64", ragged=True)
    layer = tfdistill.layers.ShardedEmbedding(20, 3, combiner="mean")
    model = keras.Model(inputs, layer(inputs))
    assert model.output_shape == (None, 3)
    bags = tf.ragged.constant(BAGS, dtype=tf.int64)
    np.testing.assert_array_equal(model(bags), layer(bags))


def test_mixed_precision_sums_gradients_in_float32():
    layer = _layer(2, 1, dtype="mixed_bfloat16")
    ids = np.zeros([1000], "int32")
    with tf.GradientTape() as tape:
        found = layer(ids)
        loss = tf.reduce_sum(tf.cast(found, tf.float32))
    assert found.dtype == tf.bfloat16
    (gradient,) = tape.gradient(loss, layer.shards)
    assert gradient.values.dtype == tf.float32
    # bfloat16 would stop to count at 256.
    np.testing.assert_array_equal(gradient.values, [[1000.0]])


@pytest.mark.parametrize("bad", [-1, 2**40])
@pytest.mark.parametrize("in_function", [False, True])
def test_an_id_out_of_range_is_refused_by_name(bad, in_function):
    layer = _layer(name="my_table", num_shards=3)
    call = tf.function(layer) if in_function else layer
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        call(tf.constant([[3, bad]], tf.int64))
    message = str(raised.value)
    assert "my_table" in message
    assert f"must be >= 0 and < 20; received {bad}." in message
    assert "oov_index" in message


def test_ids_out_of_range_become_the_chosen_one():
    layer = _layer([20, 5], oov_index=2, num_shards=3)
    found = layer(np.array([[20, -1], [3, 2**31]]))
    np.testing.assert_array_equal(found, layer(np.array([[2, 2], [3, 2]])))


@pytest.mark.parametrize(
    ("arguments", "ids", "message"),
    [
        ({}, lambda: np.zeros([2], "float32"), "int32 or int64.*float32"),
        (
            {},
            lambda: keras.Input([2], dtype="string"),
            "(?s)^(?!.*infer the output).*int32 or int64.*string",
        ),
        ({}, lambda: tf.sparse.from_dense([[1, 0]]), "received .*SparseTensor"),
        (
            {"combiner": "sum"},
            lambda: tf.ragged.constant([[[1], []]]),
            r"\[batch, \(k\)\]",
        ),
        ({"input_dim": 0}, None, "`input_dim` .*received \\[0\\]"),
        ({"oov_index": 20}, None, r"`oov_index` .*received 20"),
        ({"num_shards": 21}, None, "`num_shards`.*received 21"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, ids, message):
    with pytest.raises(ValueError, match=message):
        _layer(**arguments)(ids())


@pytest.fixture
def _small_blocks(monkeypatch):
    monkeypatch.setattr("tfdistill.embedding.rows.BLOCK_ELEMENTS", 20)


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("initializer", [_uniform(), "ones"])
def test_initial_values_do_not_depend_on_the_shards(initializer):
    arguments = {"embeddings_initializer": initializer, "input_dim": 45}
    one = cases.table(_layer(**arguments))
    assert one.shape == (45, 3)
    for num_shards in (2, 7):
        other = cases.table(_layer(**arguments, num_shards=num_shards))
        np.testing.assert_array_equal(other, one)
    if initializer != "ones":
        assert len(np.unique(one)) > 0.9 * one.size


@pytest.mark.usefixtures("_small_blocks")
def test_initial_values_follow_the_seeds():
    def drawn(seed=None, global_seed=3):
        keras.utils.set_random_seed(global_seed)
        return cases.table(_layer(embeddings_initializer=_uniform(seed)))

    np.testing.assert_array_equal(drawn(), drawn())
    np.testing.assert_array_equal(drawn(5), drawn(5, global_seed=4))
    assert (drawn() != drawn(global_seed=4)).all()
    assert (drawn(5) != drawn(6)).all()


def test_weights_files_suit_any_number_of_shards(tmp_path):
    model = cases.model(num_shards=2)
    path = str(tmp_path / "m.weights.h5")
    model.save_weights(path)
    other = cases.model(num_shards=7)
    for shard in other.get_layer("table").shards:
        shard.assign(tf.zeros_like(shard))
    other.load_weights(path)
    np.testing.assert_array_equal(
        cases.table(other.get_layer("table")),
        cases.table(model.get_layer("table")),
    )


def test_keras_files_keep_the_layer(tmp_path):
    model = cases.model(num_shards=3)
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert len(loaded.get_layer("table").shards) == 3
    x, _ = cases.data()
    np.testing.assert_array_equal(loaded(x), model(x))


def test_a_layer_that_was_saved_with_names_of_its_fields_is_read():
    layer = _layer([5, 6])
    config = {**layer.get_config(), "field_names": ["first", "second"]}
    assert type(layer).from_config(config).get_config() == layer.get_config()


SPEC = tf.TensorSpec([None, len(cases.FIELDS)], tf.int32)


def _graph(model):
    return student_graph.StudentGraph(model, SPEC)


def _trained(num_shards, seed=0):
    model = cases.model(num_shards=num_shards)
    codistillation_cases.randomize(model, seed)
    return model


def test_graphs_do_not_depend_on_the_shards(two_replicas):
    one, three = _graph(_trained(1, seed=1)), _graph(_trained(3, seed=2))
    assert three.fingerprint == one.fingerprint
    with two_replicas.scope():
        assert _graph(_trained(2)).fingerprint == one.fingerprint
    x, _ = cases.data()
    values = [v.value for v in three.variables]
    expected = _trained(3, seed=2)(x)
    np.testing.assert_allclose(one(values, x), expected, rtol=1e-6)
    np.testing.assert_allclose(three(values, x), expected, rtol=1e-6)
