"""The rules against NumPy on quadratics, over 50 mixes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdistill import mixing

_NUM_MIXES, _NUM_STEPS, _RATE = 50, 3, 0.05
_SHAPES = ((3, 2), (4,))
_SIZE = sum(int(np.prod(shape)) for shape in _SHAPES)


def _quadratics(num_groups=4):
    """Each group's curvatures, `[groups, n, n]`, and minima `[groups, n]`."""
    rng = np.random.default_rng(0)
    roots = rng.normal(size=(num_groups, _SIZE, _SIZE)) / 3
    hessians = roots @ roots.transpose(0, 2, 1)
    return hessians, rng.normal(size=(num_groups, _SIZE))


def _trained(points):
    """A few steps of gradient descent for each row of points."""
    hessians, minima = _quadratics(len(points))
    for _ in range(_NUM_STEPS):
        slopes = np.einsum("gij,gj->gi", hessians, points - minima)
        points = points - _RATE * slopes
    return points


def _averaging(x, means, state, num):
    return x + 0.5 * (means - x), state


def _block(x, means, state, num):
    model = state.setdefault("g", np.zeros_like(x) + state["x0"])
    velocity = 0.6 * state.get("v", 0) + 0.9 * (means - model)
    state |= {"v": velocity, "g": model + velocity}
    return state["g"], state


def _nesterov(x, means, state, num):
    anchor = state.setdefault("a", np.zeros_like(x) + state["x0"])
    gradient = anchor - means
    velocity = 0.9 * state.get("v", 0) - 0.07 * gradient
    state |= {"v": velocity, "a": anchor + 0.9 * velocity - 0.07 * gradient}
    return state["a"], state


def _adam(x, means, state, num):
    anchor = state.setdefault("a", np.zeros_like(x) + state["x0"])
    gradient, t = anchor - means, state.get("t", 0) + 1
    m = 0.9 * state.get("m", 0) + 0.1 * gradient
    v = 0.999 * state.get("v", 0) + 0.001 * gradient**2
    rate = 0.03 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
    state |= {"m": m, "v": v, "t": t}
    state["a"] = anchor - rate * m / (np.sqrt(v) + 1e-7)
    return state["a"], state


# Made by each test: an optimizer has variables.
_CASES = {
    "averaging": (lambda: mixing.ModelAveraging(0.5), _averaging),
    "bmuf": (
        lambda: mixing.OuterOptimizer(keras.optimizers.SGD(0.9, momentum=0.6)),
        _block,
    ),
    "diloco": (
        lambda: mixing.OuterOptimizer(
            keras.optimizers.SGD(0.07, momentum=0.9, nesterov=True)
        ),
        _nesterov,
    ),
    "adam": (lambda: mixing.OuterOptimizer(keras.optimizers.Adam(0.03)), _adam),
}


def _split(point):
    parts = np.split(point, [6])
    return [
        part.reshape(shape) for part, shape in zip(parts, _SHAPES, strict=True)
    ]


def _joined(values):
    return np.concatenate([np.reshape(v, [-1]) for v in values])


@pytest.mark.parametrize("name", _CASES)
def test_a_rule_is_its_formula_over_fifty_mixes(name):
    make, reference = _CASES[name]
    rule = make()
    # Each group in a ring of four mixes with two others.
    matrix = (np.eye(4) + np.eye(4)[[1, 2, 3, 0]] + np.eye(4)[[3, 0, 1, 2]]) / 3
    num = 3
    begin = np.random.default_rng(1).normal(size=_SIZE)
    found = expected = np.stack([begin] * 4)
    known = {"x0": begin}
    tensors = [tf.constant(v, tf.float64) for v in _split(begin)]
    states = [rule.start(tensors)] * 4
    mix = tf.function(rule.mixed, autograph=False)
    for _ in range(_NUM_MIXES):
        found, expected = _trained(found), _trained(expected)
        means = matrix @ found
        rows = []
        for group in range(4):
            new, states[group] = mix(
                [tf.constant(v) for v in _split(found[group])],
                [tf.constant(v) for v in _split(means[group])],
                states[group],
                num=tf.constant(num, tf.float64),
            )
            rows.append(_joined(new))
        found = np.stack(rows)
        expected, known = reference(expected, matrix @ expected, known, num)
    # They went somewhere, and did not merely stay alike.
    assert np.abs(expected - begin).max() > 0.1
    # Keras' Adam finds its rate in float32.
    tolerance = 1e-5 if name == "adam" else 1e-6
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
    assert mix.experimental_get_tracing_count() == 1


def test_equal_weights_stay_what_they_are_to_the_bit():
    values = [tf.random.stateless_normal([1000], [1, 2])]
    for make, _ in _CASES.values():
        rule = make()
        new, state = rule.mixed(values, values, rule.start(values), num=3)
        np.testing.assert_array_equal(new[0], values[0])
        again = rule.statistics(values, values)
        np.testing.assert_array_equal(again[0], values[0])
        assert len(state) == len(rule.start(values))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mixing.ModelAveraging(0.0), "`alpha` must be a number > 0"),
        (lambda: mixing.ModelAveraging(1.5), "<= 1; received 1.5"),
        (lambda: mixing.OuterOptimizer("sgd"), r"keras.optimizers.SGD\(0.7"),
    ],
)
def test_numbers_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
