"""Quasi-global momentum against its paper's algorithm."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.cases import codistillation as cases
from tests.cases import tiers
from tests.optimizers_test import decayed
from tests.optimizers_test import falling
from tests.optimizers_test import trained
from tfdistill.contrib import quasi_global

SGD = keras.optimizers.SGD
RING = np.array(
    [[2, 1, 0, 1], [1, 2, 1, 0], [0, 1, 2, 1], [1, 0, 1, 2]], "float64"
)
RING /= RING.sum(axis=1)
BETA = 0.9


def targets():
    """Where each of four groups' quadratics has its minimum, `[4, 3, 2]`."""
    return np.random.default_rng(0).normal(size=[4, 3, 2])


def ring_by_numpy(num_steps, *, every_steps=1, nesterov=False, decay=0.0):
    """Algorithm 1 of arXiv:2102.04761: four groups, each on its quadratic."""
    goals = targets()
    x = np.ones_like(goals)
    buffer, start, rates = np.zeros_like(x), x, 0.0
    for step in range(num_steps):
        gradient = x - goals + decay * x
        moved = BETA * buffer + gradient
        if nesterov:
            moved = gradient + BETA * moved
        rate = ring_rate()(step).numpy()
        x, rates = x - rate * moved, rates + rate
        if (step + 1) % every_steps == 0:
            x = np.einsum("ij,j...->i...", RING, x)
            buffer = BETA * buffer + (1 - BETA) * (start - x) / rates
            start, rates = x, 0.0
    return x


def ring_rate():
    return keras.optimizers.schedules.PiecewiseConstantDecay([9], [0.1, 0.05])


def ring_by_keras(num_steps, strategy, *, every_steps=1, decay=0.0, **kwargs):
    goals = targets()
    groups = []
    with strategy.scope():
        for _ in goals:
            optimizer = decayed(
                quasi_global.QuasiGlobalMomentum,
                coupled=True,
                learning_rate=ring_rate(),
                weight_decay=decay or None,
                momentum=BETA,
                every_steps=every_steps,
                **kwargs,
            )
            variable = keras.Variable(np.ones([3, 2]), name="kernel")
            optimizer.build([variable])
            groups.append((optimizer, variable))

    @tf.function
    def step():
        def in_replica():
            share = 1.0 / strategy.num_replicas_in_sync
            for (optimizer, variable), goal in zip(groups, goals, strict=True):
                gradient = tf.convert_to_tensor(variable) - goal
                optimizer.apply([share * gradient], [variable])

        strategy.run(in_replica)

    for number in range(1, num_steps + 1):
        step()
        if number % every_steps == 0:
            x = np.stack([variable.numpy() for _, variable in groups])
            for (_, variable), mean in zip(
                groups, np.einsum("ij,j...->i...", RING, x), strict=True
            ):
                variable.assign(mean)
    return np.stack([variable.numpy() for _, variable in groups])


@pytest.mark.parametrize(
    ("every_steps", "nesterov"), [tiers.deep(1, False), (5, True)]
)
def test_a_ring_of_four_is_the_paper_s(every_steps, nesterov, two_replicas):
    options = {"every_steps": every_steps, "nesterov": nesterov, "decay": 0.1}
    expected = ring_by_numpy(50, **options)
    for strategy in (tf.distribute.get_strategy(), two_replicas):
        found = ring_by_keras(50, strategy, **options)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_step_at_rate_zero_says_nothing_of_a_mix():
    optimizer = quasi_global.QuasiGlobalMomentum(
        keras.optimizers.schedules.PiecewiseConstantDecay([0], [0.0, 1.0])
    )
    kernel = keras.Variable(np.ones([2]), name="kernel")
    optimizer.apply([tf.ones([2])], [kernel])
    kernel.assign([5.0, 5.0])
    optimizer.apply([tf.ones([2])], [kernel])
    np.testing.assert_allclose(kernel.numpy(), 4.0)


@pytest.mark.deep
def test_quasi_global_momentum_of_zero_is_plain_descent():
    """With clipping, decay and an average of weights."""
    for options in (
        {"clipnorm": 0.1},
        {"weight_decay": 0.2},
        {"use_ema": True},
    ):
        own = SGD(0.1, **options)
        ours = quasi_global.QuasiGlobalMomentum(0.1, momentum=0.0, **options)
        cases.assert_close(trained(ours)[1], trained(own)[1], rtol=1e-6)


def test_files_keep_buffers_last_weights_and_a_changed_rate(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    optimizer = decayed(
        quasi_global.QuasiGlobalMomentum,
        coupled=True,
        learning_rate=0.5,
        weight_decay=falling(),
        momentum=0.5,
        nesterov=True,
        every_steps=2,
    )
    model.compile(optimizer, "mse")
    optimizer.learning_rate = 0.25
    x, y = np.ones([4, 2]), np.ones([4, 3])
    model.fit(x, y, verbose=0, epochs=3)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert again.optimizer.get_config() == optimizer.get_config()
    for each in (model, again):
        # A mix between two steps.
        each.set_weights([0.5 * weight for weight in each.get_weights()])
        each.fit(x, y, verbose=0, epochs=3)
    cases.assert_close(again, model)


def test_a_momentum_of_one_is_refused():
    with pytest.raises(ValueError, match=r"`momentum` must be in \[0, 1\)"):
        quasi_global.QuasiGlobalMomentum(momentum=1.0)
