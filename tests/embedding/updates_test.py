"""Training with tables: against Keras on dense gradients, and what it costs."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import embedding as cases
from tests.cases import tiers
from tfdistill.embedding import layer as embedding_layer

NUM_EPOCHS, BATCH_SIZE = 2, 8


def _shared(*args):
    return tfdistill.DistributedModel(keras.Model(*args))


class DenseModel(keras.Model):
    """Keras' own update, from gradients made dense by hand."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        variables = self.trainable_variables
        gradients = [
            tf.math.unsorted_segment_sum(g.values, g.indices, v.shape[0])
            if isinstance(g, tf.IndexedSlices)
            else g
            for g, v in zip(
                tape.gradient(loss, variables), variables, strict=True
            )
        ]
        self.optimizer.apply(gradients, variables)
        return {"loss": loss}


def _train(model, optimizer, *, data=None, **kwargs):
    model.compile(optimizer, "mse", **kwargs)
    x, y = data or cases.data()
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH_SIZE)
    model.fit(dataset, epochs=NUM_EPOCHS, verbose=0, shuffle=False)
    return model


def _results(model):
    table = model.get_layer("table")
    order = table.layout.storage_rows(tf.range(table.layout.num_rows))
    by_id = cases.table(table)[order.numpy()]
    return [by_id, *model.get_layer(index=-1).get_weights()]


# Rows without a gradient stay by these rules, as they do here.
@pytest.mark.parametrize(
    "optimizer",
    [
        tiers.deep(
            lambda: keras.optimizers.SGD(
                keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5),
                clipnorm=0.1,
            )
        ),
        lambda: keras.optimizers.Adagrad(0.1, global_clipnorm=0.1),
    ],
    ids=["clipnorm_schedule", "global_clipnorm"],
)
def test_it_trains_as_keras_does_on_dense_gradients(optimizer):
    expected = _results(_train(cases.model(DenseModel), optimizer()))
    found = _results(_train(cases.model(_shared), optimizer()))
    for actual, value in zip(found, expected, strict=True):
        np.testing.assert_allclose(actual, value, rtol=1e-5, atol=1e-6)


def test_shards_and_replicas_change_nothing(two_replicas):
    def results(strategy, num_shards):
        with strategy.scope():
            # Of all shards of a table at once, after the sum over replicas.
            optimizer = keras.optimizers.SGD(0.1, clipnorm=0.1)
            model = cases.model(_shared, num_shards)
            return _results(_train(model, optimizer))

    expected = results(tf.distribute.get_strategy(), 1)
    for actual, value in zip(results(two_replicas, 3), expected, strict=True):
        np.testing.assert_allclose(actual, value, rtol=1e-5, atol=1e-6)


def test_a_frozen_table_stays_as_it_is():
    model = cases.model(_shared)
    layer = model.get_layer("table")
    layer.trainable = False
    before = cases.table(layer)
    _train(model, keras.optimizers.Adagrad(0.1))
    np.testing.assert_array_equal(cases.table(layer), before)
    assert model.trainer.table_shards == []


def test_a_table_used_in_any_other_way_is_refused():
    class Tied(keras.Model):
        def call(self, ids, training=None):
            hidden = self.embedding(ids)[:, 0]
            return hidden @ tf.transpose(self.embedding.shards[0].value)

        def __init__(self):
            super().__init__()
            self.embedding = tfdistill.layers.ShardedEmbedding(
                26, 4, name="mine"
            )
            self.embedding.build()

    x, y = cases.data()
    with pytest.raises(ValueError, match="'mine' must be used only by lookups"):
        _train(
            tfdistill.DistributedModel(Tied()),
            keras.optimizers.SGD(0.1),
            data=(x, np.tile(y, 26)),
        )


def _sizes(graph):
    """First dimensions of all tensors of a graph and its functions."""
    functions = [graph, *(f.graph for f in graph._functions.values())]
    return {
        output.shape[0]
        for each in functions
        for op in each.get_operations()
        for output in op.outputs
        if output.shape.rank
    }


@pytest.mark.parametrize(
    "options", [tiers.deep({}), {"combine_on_servers": True}]
)
def test_no_operation_of_a_step_has_the_table_s_size(options):
    num_rows = 10_000_019
    inputs = keras.Input((None,), dtype="int64")
    layer = embedding_layer.ShardedEmbedding(
        num_rows,
        1,
        combiner="sum",
        num_shards=3,
        embeddings_initializer="zeros",
        **options,
    )
    model = _shared(inputs, layer(inputs))
    model.compile(keras.optimizers.Adagrad(0.1, global_clipnorm=1.0), "mse")
    x = np.array([[0, num_rows - 1, 7, 7, 7, 7], [7] * 6])
    model.fit(x, np.ones([2, 1]), verbose=0)
    step = tf.function(model.train_step).get_concrete_function(
        (tf.constant(x), tf.ones([2, 1]))
    )
    found = _sizes(step.graph)
    assert 2 in found
    assert not found & {num_rows, *layer.layout.shard_sizes}
    touched = sum(np.count_nonzero(shard.numpy()) for shard in layer.shards)
    assert touched == 3
