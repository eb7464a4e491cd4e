"""Tables of keras-rs' configurations, against keras-rs' own layer."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_rs import layers

import tfdistill
from tests.cases import codistillation as cases
from tests.cases import servers as server_cases
from tfdistill.embedding import tables

BATCH, DIM = 4, 3


def _configs(**options):
    """Features of two tables, one of them shared, in a nested structure."""
    words = layers.TableConfig("words", 11, DIM, combiner="sqrtn", **options)
    users = layers.TableConfig("users", 7, DIM, combiner="sum")

    def feature(name, table, *shape):
        return layers.FeatureConfig(name, table, (BATCH, *shape), (BATCH, DIM))

    return {
        "texts": (feature("title", words, 2), feature("body", words, 5)),
        "user": feature("user", users),
    }


def _inputs(num_examples=BATCH):
    rng = np.random.default_rng(1)

    def ids(limit, *shape):
        return rng.integers(0, limit, (num_examples, *shape)).astype("int32")

    return {"texts": (ids(11, 2), ids(11, 5)), "user": ids(7)}


def _alike(configs):
    """Both layers of the same tables."""
    theirs = layers.DistributedEmbedding(configs)
    ours = tfdistill.layers.FeatureEmbedding(configs)
    theirs(_inputs()), ours(_inputs())
    tables = theirs.get_embedding_tables()
    for index, stack in enumerate(ours.stacks):
        by_field = {
            field: np.asarray(tables[name])
            for name, (number, field) in ours.tables.items()
            if number == index
        }
        rows = np.concatenate([by_field[field] for field in sorted(by_field)])
        stack.load_own_variables({"table": _stored(stack, rows)})
    return theirs, ours


def _stored(layer, table):
    """Rows by id in the order in which the layer has them."""
    rows = layer.layout.storage_rows(tf.range(len(table), dtype=tf.int64))
    stored = np.empty_like(table)
    stored[np.asarray(rows)] = table
    return stored


def test_it_gives_what_keras_rs_gives():
    theirs, ours = _alike(_configs())
    expected, actual = theirs(_inputs()), ours(_inputs())
    keras.tree.assert_same_structure(actual, expected)
    cases.assert_close(actual, expected, rtol=1e-5)
    # Features of one configuration share its table.
    assert sorted(ours.tables) == ["users", "words"]
    bags = tf.ragged.constant([[1], [], [2, 3, 3], [0]], tf.int32)
    ragged = ours({**_inputs(), "texts": (bags, _inputs()["texts"][1])})
    number, field = ours.tables["words"]
    stack = ours.stacks[number]
    ids = np.zeros([2, len(stack.input_dim)], "int32")
    ids[:, field] = [2, 3]
    vectors = stack(ids)[:, field]
    mean = (vectors[0] + 2 * vectors[1]) / np.sqrt(3)
    np.testing.assert_allclose(ragged["texts"][0][2], mean, rtol=1e-6)


def _model(layer):
    inputs = {
        "texts": (
            keras.Input((2,), dtype="int32"),
            keras.Input((5,), dtype="int32"),
        ),
        "user": keras.Input((), dtype="int32", name="user"),
    }
    found = keras.layers.Concatenate()(keras.tree.flatten(layer(inputs)))
    top = keras.layers.Dense(1, kernel_initializer="ones")(found)
    return keras.Model(inputs, top)


@pytest.mark.deep
def test_it_trains_as_keras_rs(monkeypatch):
    """As on servers; updates_test compares with tables on replicas."""
    layers_of = _alike(_configs())
    weights = []
    x, y = _inputs(24), np.linspace(-1, 1, 24)[:, None].astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    for layer, wrap in zip(
        layers_of, (lambda m: m, tfdistill.DistributedModel), strict=True
    ):
        if layer is layers_of[1]:
            server_cases.pretend(monkeypatch)
        model = wrap(_model(layer))
        model.compile(keras.optimizers.SGD(0.02), "mse")
        model.fit(data, epochs=2, verbose=0, shuffle=False)
        found = model.predict(data, verbose=0)
        weights.append(found)
    np.testing.assert_allclose(weights[0], weights[1], rtol=1e-4, atol=1e-5)
    assert len(tables.tables_of(model)) == 1


def test_a_file_keeps_shared_tables(tmp_path):
    model = _model(tfdistill.layers.FeatureEmbedding(_configs(), oov_index=2))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(
        loaded.predict(_inputs(), verbose=0),
        model.predict(_inputs(), verbose=0),
    )
    assert len(tables.tables_of(loaded)) == 1


def test_tables_that_differ_are_not_stacked():
    scaled = keras.initializers.VarianceScaling
    tables = [
        layers.TableConfig("a", 11, DIM),
        layers.TableConfig("b", 5, DIM),
        layers.TableConfig("c", 11, DIM + 1),
        layers.TableConfig("d", 11, DIM, initializer="ones"),
        layers.TableConfig("e", 11, DIM, initializer=scaled(mode="fan_in")),
        layers.TableConfig("f", 11, DIM, initializer=scaled(mode="fan_in")),
    ]
    made = tfdistill.layers.FeatureEmbedding(
        [_feature(t, t.embedding_dim) for t in tables]
    )
    assert [stack.input_dim for stack in made.stacks] == [
        *([11, 5], [11], [11], [11], [11])
    ]
    made([tf.zeros([BATCH], tf.int32)] * 6)
    bad = [tf.fill([BATCH], index) for index in (0, 5, 0, 0, 0, 0)]
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="< 5; received 5 in field b"
    ):
        made(bad)


def _feature(table, dim=DIM):
    return layers.FeatureConfig("x", table, (BATCH,), (BATCH, dim))


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (
            lambda: _configs(optimizer="adagrad"),
            "leave `optimizer` out.* 'adagrad' for 'words'.*`compile`",
        ),
        (
            lambda: [_feature(layers.TableConfig("a", n, DIM)) for n in (3, 4)],
            "two different tables named 'a'",
        ),
    ],
)
def test_what_the_tables_have_not_is_refused(features, message):
    with pytest.raises(ValueError, match=message):
        tfdistill.layers.FeatureEmbedding(features())
