"""Tests of LARS against the paper's algorithm in NumPy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tfdistill import fused_updates

DECAYS = (0.5, 0.5, 0.05, 0.05)


def falling():
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
        for _ in DECAYS
    ]


def by_numpy(*, trust=0.02, momentum=0.9, nesterov=False):
    """Algorithm 1 of arXiv:1708.03888, with the rate 1 where it says none."""
    values = start()
    velocities = {name: 0.0 for name in values}
    rates = (2.0, 4.0, 4.0, 4.0)
    for step, rate, decay in zip(gradients(), rates, DECAYS, strict=True):
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


def trained(optimizer, strategy=None):
    strategy = strategy or tf.distribute.get_strategy()
    with strategy.scope():
        variables = {
            name: keras.Variable(value.astype("float32"), name=name)
            for name, value in start().items()
        }
        optimizer.build(list(variables.values()))

    @tf.function
    def step(values):
        def in_replica():
            share = 1.0 / strategy.num_replicas_in_sync
            optimizer.apply(
                [share * value for value in values], list(variables.values())
            )

        strategy.run(in_replica)

    for values in gradients():
        step([tf.constant(v, tf.float32) for v in values.values()])
    return {name: v.numpy() for name, v in variables.items()}


@pytest.mark.parametrize("nesterov", [False, True])
def test_it_is_the_paper_s_algorithm(nesterov, two_replicas):
    expected = by_numpy(nesterov=nesterov)
    for strategy in (tf.distribute.get_strategy(), two_replicas):
        with strategy.scope():
            optimizer = tfdistill.LARS(
                rate_of_step(),
                nesterov=nesterov,
                trust_coefficient=0.02,
                weight_decay=falling(),
            )
        found = trained(optimizer, strategy)
        for name, value in expected.items():
            np.testing.assert_allclose(
                found[name], value, rtol=1e-5, atol=1e-6, err_msg=name
            )


def test_without_decay_and_momentum_the_step_is_a_share_of_the_weights():
    kernel = keras.Variable(np.full([4, 4], 2.0, "float32"), name="kernel")
    optimizer = tfdistill.LARS(1.0, momentum=0.0, trust_coefficient=0.01)
    for scale in (1e-6, 1.0, 1e6):
        before = kernel.numpy()
        optimizer.apply([scale * tf.eye(4)], [kernel])
        change = np.linalg.norm(kernel.numpy() - before)
        np.testing.assert_allclose(
            change, 0.01 * np.linalg.norm(before), rtol=1e-4
        )


def test_without_a_gradient_there_is_the_decay_alone():
    kernel = keras.Variable(np.ones([2, 2], "float32"), name="kernel")
    optimizer = tfdistill.LARS(0.5, momentum=0.0, weight_decay=0.1)
    optimizer.apply([tf.zeros([2, 2])], [kernel])
    np.testing.assert_allclose(kernel.numpy(), 1 - 0.5 * 0.1, rtol=1e-6)


def test_bfloat16_weights_get_a_rate_in_float32():
    # In bfloat16 a sum of 4096 ones ends at 256.
    kernel = keras.Variable(np.ones([64, 64]), dtype="bfloat16", name="kernel")
    optimizer = tfdistill.LARS(8.0, momentum=0.0, trust_coefficient=1 / 64)
    optimizer.apply([tf.fill([64, 64], tf.cast(2.0, tf.bfloat16))], [kernel])
    np.testing.assert_allclose(
        np.asarray(kernel.numpy(), "float32"), 1 - 8 / 64, rtol=1e-2
    )


def test_a_config_gives_back_an_equal_optimizer():
    optimizer = tfdistill.LARS(
        rate_of_step(),
        momentum=0.8,
        nesterov=True,
        trust_coefficient=0.1,
        weight_decay=falling(),
        clipnorm=3.0,
    )
    text = keras.saving.serialize_keras_object(optimizer)
    again = keras.saving.deserialize_keras_object(text)
    assert type(again) is tfdistill.LARS
    assert again.get_config() == optimizer.get_config()
    expected = trained(optimizer)
    for name, value in trained(again).items():
        np.testing.assert_array_equal(value, expected[name])


def test_a_saved_model_goes_on_with_its_velocities(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    model.compile(tfdistill.LARS(0.5, weight_decay=0.1), "mse")
    x, y = np.ones([4, 2]), np.ones([4, 3])
    model.fit(x, y, verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    for each in (model, again):
        each.fit(x, y, verbose=0)
    for one, other in zip(model.weights, again.weights, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"momentum": 1.0}, r"`momentum` must be in \[0, 1\); received 1.0"),
        ({"trust_coefficient": 0.0}, "must be > 0; received 0.0"),
        ({"weight_decay": -1.0}, "received -1.0"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        tfdistill.LARS(**options)


def test_fused_updates_refuse_it():
    with pytest.raises(ValueError, match="for fused updates; received LARS"):
        fused_updates.rule_for(tfdistill.LARS())


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
