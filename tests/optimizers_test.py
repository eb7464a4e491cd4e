"""Tests of the optimizers against their papers' algorithms in NumPy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tfdistill import optimizers

LARS_DECAYS = (0.5, 0.5, 0.05, 0.05)


def falling_lars_decay():
    return keras.optimizers.schedules.PiecewiseConstantDecay([1], [0.5, 0.05])


def rate_of_step():
    return keras.optimizers.schedules.PiecewiseConstantDecay([0], [2.0, 4.0])


def start():
    rng = np.random.default_rng(0)
    return {
        "kernel": rng.normal(size=[4, 3]),
        "bias": rng.normal(size=[3]),
        "gamma": rng.normal(size=[2, 3]),
        "zero_kernel": np.zeros([2, 2]),
    }


def gradients():
    rng = np.random.default_rng(1)
    return [
        {name: rng.normal(size=value.shape) for name, value in start().items()}
        for _ in LARS_DECAYS
    ]


def by_numpy(*, trust=0.02, momentum=0.9, nesterov=False):
    """Algorithm 1 of arXiv:1708.03888, with the rate 1 where it says none."""
    values = start()
    velocities = {name: 0.0 for name in values}
    rates = (2.0, 4.0, 4.0, 4.0)
    for step, rate, decay in zip(gradients(), rates, LARS_DECAYS, strict=True):
        for name, gradient in step.items():
            weights, local = values[name], 1.0
            if "kernel" in name:
                size, slope = np.linalg.norm(weights), np.linalg.norm(gradient)
                if size > 0 and slope > 0:
                    local = trust * size / (slope + decay * size)
                gradient = gradient + decay * weights
            change = rate * local * gradient
            velocity = momentum * velocities[name] + change
            velocities[name] = velocity
            if nesterov:
                velocity = momentum * velocity + change
            values[name] = weights - velocity
    return values


def updated(optimizer, values, slopes, strategy=None):
    """Applies given gradients; returns the values by name after each step."""
    strategy = strategy or tf.distribute.get_strategy()
    with strategy.scope():
        variables = {
            name: keras.Variable(value.astype("float32"), name=name)
            for name, value in values.items()
        }
        optimizer.build(list(variables.values()))

    @tf.function
    def step(slopes):
        def in_replica():
            share = 1.0 / strategy.num_replicas_in_sync
            optimizer.apply(
                [share * slope for slope in slopes], list(variables.values())
            )

        strategy.run(in_replica)

    found = []
    for each in slopes:
        step([tf.constant(v, tf.float32) for v in each.values()])
        found.append({name: v.numpy() for name, v in variables.items()})
    return found


def trained_by_lars(optimizer, strategy=None):
    return updated(optimizer, start(), gradients(), strategy)[-1]


@pytest.mark.parametrize("nesterov", [False, True])
def test_it_is_the_paper_s_algorithm(nesterov, two_replicas):
    expected = by_numpy(nesterov=nesterov)
    for strategy in (tf.distribute.get_strategy(), two_replicas):
        with strategy.scope():
            optimizer = tfdistill.optimizers.LARS(
                rate_of_step(),
                nesterov=nesterov,
                trust_coefficient=0.02,
                weight_decay=falling_lars_decay(),
            )
        found = trained_by_lars(optimizer, strategy)
        for name, value in expected.items():
            np.testing.assert_allclose(
                found[name], value, rtol=1e-5, atol=1e-6, err_msg=name
            )


def test_bfloat16_weights_get_a_rate_in_float32():
    # In bfloat16 a sum of 4096 ones ends at 256.
    kernel = keras.Variable(np.ones([64, 64]), dtype="bfloat16", name="kernel")
    optimizer = tfdistill.optimizers.LARS(
        8.0, momentum=0.0, trust_coefficient=1 / 64
    )
    optimizer.apply([tf.fill([64, 64], tf.cast(2.0, tf.bfloat16))], [kernel])
    np.testing.assert_allclose(
        np.asarray(kernel.numpy(), "float32"), 1 - 8 / 64, rtol=1e-2
    )


def test_a_saved_model_goes_on_with_its_velocities(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    model.compile(tfdistill.optimizers.LARS(0.5, weight_decay=0.1), "mse")
    x, y = np.ones([4, 2]), np.ones([4, 3])
    model.fit(x, y, verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    for each in (model, again):
        each.fit(x, y, verbose=0)
    for one, other in zip(model.weights, again.weights, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


SGD = keras.optimizers.SGD
DECAYS = (0.5, 0.5, 0.05, 0.05, 0.0, 0.0)


def falling():
    return keras.optimizers.schedules.PiecewiseConstantDecay(
        [1, 3], [0.5, 0.05, 0.0]
    )


def decayed(kind, *, coupled, **kwargs):
    return optimizers.with_kernel_decay(kind, coupled=coupled)(**kwargs)


def trained(optimizer, num_steps=6, strategy=None):
    """Runs steps of given gradients; returns kernel and bias after each."""
    gradients = np.random.default_rng(1).normal(size=[num_steps, 3, 2])
    found = updated(
        optimizer,
        {"kernel": np.ones([3, 2]), "bias": np.ones([2])},
        [{"kernel": g, "bias": g[0]} for g in gradients],
        strategy,
    )
    return gradients, [(each["kernel"], each["bias"]) for each in found]


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
        for (kernel, bias), a, b in zip(found, kernels, biases, strict=True):
            np.testing.assert_allclose(kernel, a, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(bias, b, rtol=1e-5, atol=1e-6)


def test_a_constant_decay_is_keras_own_on_kernels():
    own = keras.optimizers.AdamW(0.1, weight_decay=0.2)
    own.exclude_from_weight_decay(var_names=["bias"])
    ours = decayed(
        keras.optimizers.AdamW,
        coupled=False,
        learning_rate=0.1,
        weight_decay=0.2,
    )
    for one, other in zip(trained(own)[1], trained(ours)[1], strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        np.testing.assert_array_equal(one[1], other[1])


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
    "make, expected",
    [
        (lambda: keras.layers.SeparableConv1D(2, 3), ["both"]),
        (lambda: keras.layers.LayerNormalization(axis=[1, 2]), []),
        (lambda: keras.layers.GRU(2), ["kernel", "recurrent_kernel"]),
        (lambda: keras.layers.Embedding(3, 2), ["embeddings"]),
    ],
)
def test_kernels_decay_and_nothing_else(make, expected):
    layer = make()
    shape = (None, 4) if isinstance(layer, keras.layers.Embedding) else None
    layer.build(shape or (None, 4, 3))
    kernels = [
        v.name for v in layer.trainable_variables if optimizers.is_kernel(v)
    ]
    both = ["depthwise_kernel", "pointwise_kernel"]
    assert kernels == (both if expected == ["both"] else expected)


@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("decay", [0.25, falling])
def test_a_config_gives_back_an_equal_optimizer(coupled, decay):
    decay = decay() if callable(decay) else decay
    optimizer = decayed(SGD, coupled=coupled, weight_decay=decay, momentum=0.5)
    text = keras.saving.serialize_keras_object(optimizer)
    again = keras.saving.deserialize_keras_object(text)
    assert type(again) is type(optimizer)
    assert again.get_config() == optimizer.get_config()
    for one, other in zip(
        trained(optimizer)[1], trained(again)[1], strict=True
    ):
        np.testing.assert_array_equal(one[0], other[0])
