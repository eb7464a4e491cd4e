"""Tests of the decay of kernels against its formulas in NumPy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.cases import codistillation as cases
from tfdistill import optimizers

SGD = keras.optimizers.SGD
DECAYS = [0.5, 0.5, 0.05, 0.05, 0.0, 0.0]


def falling():
    return keras.optimizers.schedules.PiecewiseConstantDecay(
        [1, 3], [0.5, 0.05, 0.0]
    )


def decayed(kind, *, coupled, **kwargs):
    return optimizers.with_kernel_decay(kind, coupled=coupled)(**kwargs)


def trained(optimizer, num_steps=6, strategy=None):
    """Runs steps of given gradients; returns kernel and bias after each."""
    strategy = strategy or tf.distribute.get_strategy()
    gradients = np.random.default_rng(1).normal(size=[num_steps, 3, 2])
    with strategy.scope():
        variables = [
            keras.Variable(np.ones(shape, "float32"), name=name)
            for name, shape in (("kernel", [3, 2]), ("bias", [2]))
        ]
        optimizer.build(variables)

    @tf.function
    def step(gradient):
        def in_replica():
            share = gradient / strategy.num_replicas_in_sync
            optimizer.apply([share, share[0]], variables)

        strategy.run(in_replica)

    found = []
    for gradient in gradients:
        step(tf.constant(gradient, tf.float32))
        found.append([variable.numpy() for variable in variables])
    return gradients, found


def by_hand(gradients, decays, *, rate, momentum, coupled, is_kernel=True):
    """Momentum as Keras has it: the rate is part of the velocity."""
    value, velocity, found = np.ones_like(gradients[0]), 0.0, []
    for gradient, decay in zip(gradients, decays, strict=True):
        decay = decay if is_kernel else 0.0
        if coupled:
            gradient = gradient + decay * value
        else:
            value = value - rate * decay * value
        velocity = momentum * velocity - rate * gradient
        value = value + velocity
        found.append(value)
    return found


@pytest.mark.parametrize("coupled", [True, False])
def test_each_step_has_the_decay_of_its_time(coupled, two_replicas):
    for strategy in (tf.distribute.get_strategy(), two_replicas):
        with strategy.scope():
            optimizer = decayed(
                SGD,
                coupled=coupled,
                learning_rate=0.1,
                momentum=0.9,
                weight_decay=falling(),
            )
        gradients, found = trained(optimizer, strategy=strategy)
        settings = {"rate": 0.1, "momentum": 0.9, "coupled": coupled}
        kernels = by_hand(gradients, DECAYS, **settings)
        biases = by_hand(gradients[:, 0], DECAYS, is_kernel=False, **settings)
        expected = list(zip(kernels, biases, strict=True))
        cases.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_constant_decay_is_keras_own_on_kernels():
    own = keras.optimizers.AdamW(0.1, weight_decay=0.2)
    own.exclude_from_weight_decay(var_names=["bias"])
    ours = decayed(
        keras.optimizers.AdamW,
        coupled=False,
        learning_rate=0.1,
        weight_decay=0.2,
    )
    cases.assert_close(trained(ours)[1], trained(own)[1])


def test_the_decay_comes_after_clipping():
    optimizer = decayed(
        SGD, coupled=True, learning_rate=1.0, weight_decay=0.5, clipnorm=1e-9
    )
    _, ((kernel, bias),) = trained(optimizer, num_steps=1)
    np.testing.assert_allclose(kernel, 0.5, atol=1e-6)
    np.testing.assert_allclose(bias, 1.0, atol=1e-6)


def test_rows_without_a_gradient_decay_too():
    table = keras.Variable(np.ones([3, 2], "float32"), name="embeddings")
    optimizer = decayed(SGD, coupled=True, learning_rate=1.0, weight_decay=0.5)
    slices = tf.IndexedSlices(
        tf.ones([1, 2]), tf.constant([1]), tf.constant([3, 2])
    )
    optimizer.apply([slices], [table])
    np.testing.assert_allclose(table.numpy()[:, 0], [0.5, -0.5, 0.5])


@pytest.mark.parametrize(
    "make, shape, expected",
    [
        (
            lambda: keras.layers.SeparableConv1D(2, 3),
            (4, 3),
            ["depthwise_kernel", "pointwise_kernel"],
        ),
        (lambda: keras.layers.LayerNormalization(axis=[1, 2]), (4, 3), []),
        (lambda: keras.layers.GRU(2), (4, 3), ["kernel", "recurrent_kernel"]),
        (lambda: keras.layers.Embedding(3, 2), (4,), ["embeddings"]),
    ],
)
def test_kernels_decay_and_nothing_else(make, shape, expected):
    layer = make()
    layer.build((None, *shape))
    variables = layer.trainable_variables
    assert [v.name for v in variables if optimizers.is_kernel(v)] == expected


@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("decay", [0.25, falling])
def test_a_config_gives_back_an_equal_optimizer(coupled, decay):
    decay = decay() if callable(decay) else decay
    optimizer = decayed(SGD, coupled=coupled, weight_decay=decay, momentum=0.5)
    text = keras.saving.serialize_keras_object(optimizer)
    again = keras.saving.deserialize_keras_object(text)
    assert type(again) is type(optimizer)
    assert again.get_config() == optimizer.get_config()
    cases.assert_close(trained(again)[1], trained(optimizer)[1])
