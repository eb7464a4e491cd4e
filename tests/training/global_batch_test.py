"""Losses of any name and form, labels of any rank: as Keras computes them."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import tiers
from tfdistill.training import global_batch

_P = np.array([0.1, 0.8, 0.3, 0.6, 0.9, 0.4, 0.2, 0.7], "float32")[:, None]
_Y = np.array([0, 1, 1, 0, 1, 0, 0, 1], "float32")
_WEIGHTS = np.array([1, 0.5, 2, 3, 0, 1, 4, 0.2], "float32")


def _ratio(y_true, y_pred):
    """A loss of a whole batch, as a rank among its rows is."""
    worst = tf.reduce_max(tf.abs(y_true - y_pred))
    return worst + tf.reduce_sum(y_true * y_pred) / tf.reduce_sum(y_pred)


def _against_others(y_true, y_pred):
    """A number for each row that compares it with all others."""
    alike = keras.ops.matmul(y_pred, keras.ops.transpose(y_pred))
    return keras.ops.logsumexp(alike, axis=-1) - y_true[:, 0]


def _beside_others(y_true, y_pred):
    distances = keras.ops.abs(y_pred[:, None, 0] - y_true[None, :, 0])
    return keras.ops.mean(distances, axis=-1)


def _against_the_mean(y_true, y_pred):
    error = keras.ops.square(y_true - y_pred)[:, 0]
    return error / (0.1 + keras.ops.mean(error, axis=0))


def _of_some_rows(y_true, y_pred):
    """Leaves out rows of which there is no other with their label."""
    return keras.losses.circle(keras.ops.round(3 * y_pred + y_true), y_pred)


class _Loss:
    """A loss that is an object, and one that is a method."""

    def __call__(self, y_true, y_pred):
        return keras.ops.mean(keras.ops.abs(y_true - y_pred) ** 3, axis=-1)

    def method(self, y_true, y_pred):
        return self(y_true, y_pred) * 2


class _ByItself(keras.losses.Loss):
    """Reduces by itself, as the contrastive loss of Keras' own example."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        y_true = keras.ops.reshape(y_true, (-1, 1))
        alike = keras.ops.matmul(y_pred, keras.ops.transpose(y_pred))
        values = keras.ops.logsumexp(alike, -1, keepdims=True) - y_true
        if sample_weight is not None:
            values *= keras.ops.reshape(sample_weight, (-1, 1))
        return keras.ops.mean(values)


_LOSSES = {
    name: name
    for name in (
        *("binary_crossentropy", "mse", "mae", "huber", "hinge", "poisson"),
        *("log_cosh", "cosine_similarity", "binary_focal_crossentropy"),
        *("MeanSquaredError", "mean_absolute_percentage_error"),
        *("crossentropy", "ce", "kl_divergence", "squared_hinge"),
    )
} | {
    "function": keras.losses.binary_crossentropy,
    "partial": functools.partial(
        keras.losses.binary_crossentropy, label_smoothing=0.1
    ),
    "lambda": lambda y_true, y_pred: keras.ops.square(y_true - y_pred),
    "tf_function": tf.function(keras.losses.mean_squared_error),
    "object": _Loss(),
    "method": _Loss().method,
    "class": keras.losses.Huber(),
    "by_itself": _ByItself(),
    "whole_batch": _ratio,
    "circle": "circle",
    "of_some_rows": _of_some_rows,
    "against_others": _against_others,
    "beside_others": _beside_others,
    "against_the_mean": _against_the_mean,
    "dice": keras.losses.Dice(),
    "tversky": keras.losses.Tversky(alpha=0.3),
    "sum": keras.losses.MeanSquaredError(reduction="sum"),
    "weighted_mean": keras.losses.MeanSquaredError(
        reduction="mean_with_sample_weight"
    ),
}


_EVERY_RUN = {
    "binary_crossentropy",
    "against_others",
    "ce",
    "lambda",
    "method",
    "whole_batch",
}


@pytest.mark.parametrize("name", tiers.but_for(_EVERY_RUN, _LOSSES))
def test_it_is_as_keras_computes_it(name, two_replicas):
    loss = _LOSSES[name]
    plain = keras.Sequential([keras.Input([1])])
    plain.compile(loss=loss)
    ours = global_batch.over_global_batch(loss)
    given = [
        (y, weights)
        for y in (_Y, _Y[:, None])
        for weights in (None, _WEIGHTS, _WEIGHTS[:, None])
    ]

    def of_replica(cut):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        begin, end = cut * replica, cut + (8 - cut) * replica
        return [
            ours(*(None if v is None else tf.constant(v)[begin:end] for v in x))
            for x in ((y, _P, weights) for y, weights in given)
        ]

    @tf.function
    def shares(cut):
        return [
            tf.add_n(two_replicas.experimental_local_results(each))
            for each in two_replicas.run(of_replica, [cut])
        ]

    for (y, weights), shared in zip(given, shares(tf.constant(3)), strict=True):
        expected = plain.compute_loss(
            y=tf.constant(y), y_pred=tf.constant(_P), sample_weight=weights
        )
        alone = ours(tf.constant(y), tf.constant(_P), weights)
        assert float(alone) == float(expected)
        np.testing.assert_allclose(shared, expected, rtol=2e-6)


def test_values_that_are_not_reduced_are_logged_as_their_mean(two_replicas):
    x, y = np.ones([6, 2], "float32"), np.arange(6.0)[:, None]
    losses = []
    for strategy in (two_replicas, None):
        with (strategy or tf.distribute.get_strategy()).scope():
            model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
            model.set_weights([np.ones([2, 1]), np.zeros(1)])
            if strategy:
                model = tfdistill.DistributedModel(model)
            model.compile("sgd", keras.losses.MeanSquaredError(reduction=None))
        history = model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
        losses.append(history.history["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-6)
