"""Updates, dense and by rows, against Keras' own."""

import concurrent.futures

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdistill.embedding import rules

NUM_ROWS, DIM, NUM_STEPS = 6, 3, 12
_DECAY = keras.optimizers.schedules.ExponentialDecay
OPTIMIZERS = {
    "sgd": lambda **kw: keras.optimizers.SGD(0.1, **kw),
    "schedule": lambda **kw: keras.optimizers.SGD(_DECAY(0.1, 2, 0.5), **kw),
    "momentum": lambda **kw: keras.optimizers.SGD(0.1, momentum=0.9, **kw),
    "nesterov": lambda **kw: keras.optimizers.SGD(
        0.1, momentum=0.9, nesterov=True, **kw
    ),
    "adagrad": lambda **kw: keras.optimizers.Adagrad(0.1, **kw),
    "adam": lambda **kw: keras.optimizers.Adam(0.1, **kw),
    "ftrl_all": lambda **kw: keras.optimizers.Ftrl(
        0.1,
        learning_rate_power=-0.4,
        l1_regularization_strength=0.01,
        l2_regularization_strength=0.02,
        l2_shrinkage_regularization_strength=0.03,
        beta=0.1,
        **kw,
    ),
    "adadelta": lambda: keras.optimizers.Adadelta(0.1),
    "adamax": lambda: keras.optimizers.Adamax(0.1),
    "adamw": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.02),
    "amsgrad": lambda: keras.optimizers.Adam(0.1, amsgrad=True),
    "decayed": lambda: keras.optimizers.Adagrad(0.1, weight_decay=0.02),
    "lion": lambda: keras.optimizers.Lion(0.1),
    "nadam": lambda: keras.optimizers.Nadam(0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(
        0.1, momentum=0.5, centered=True
    ),
}


def _start():
    rng = np.random.default_rng(1)
    start = rng.normal(size=(NUM_ROWS, DIM)).astype("float32")
    gradients = rng.normal(size=(NUM_STEPS, NUM_ROWS, DIM)).astype("float32")
    return start, gradients


def _by_keras(optimizer, start, gradients):
    variable = keras.Variable(start)
    for gradient in gradients:
        optimizer.apply([tf.constant(gradient)], [variable])
    return variable.numpy()


class _Updated:
    """One variable trained by updates where it lies."""

    def __init__(self, optimizer, start):
        self.optimizer = optimizer
        self.rule = rules.UpdateRule(optimizer)
        self.variable = tf.Variable(start)
        self.slots = self.rule.make_slots(
            self.variable, tf.distribute.get_strategy()
        )

    def _hyper(self):
        step = self.optimizer.iterations.value
        hyper = self.rule.hyperparameters(step)
        self.optimizer.iterations.assign_add(1)
        return hyper

    def dense(self, gradient):
        self.rule.apply_dense(
            self.variable, self.slots, gradient, self._hyper()
        )

    def rows(self, rows, gradients):
        self.rule.apply_rows(
            self.variable, self.slots, rows, gradients, self._hyper()
        )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_equal_keras(name):
    start, gradients = _start()
    updated = _Updated(OPTIMIZERS[name](), start)
    order = np.array([3, 0, 5, 1, 4, 2])
    for index, gradient in enumerate(gradients):
        if index % 2:
            updated.rows(tf.constant(order), gradient[order])
        else:
            updated.dense(gradient)
    expected = _by_keras(OPTIMIZERS[name](), start, gradients)
    np.testing.assert_allclose(updated.variable, expected, rtol=1e-5, atol=1e-6)


_FORMULAS: dict = {}


def _formula(optimizer, *slots):
    """Adds what returns the change and new slots of gradients in step t."""

    def keep(function):
        _FORMULAS[function.__name__[1:]] = optimizer, slots, function
        return function

    return keep


@_formula(lambda: keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True), 0.0)
def _nesterov(w, g, t, m):
    m = 0.9 * m - 0.01 * g
    return 0.9 * m - 0.01 * g, m


@_formula(lambda: keras.optimizers.Adagrad(0.01), 0.1)
def _adagrad(w, g, t, a):
    a = a + g**2
    return -0.01 * g / np.sqrt(a + 1e-7), a


@_formula(lambda: keras.optimizers.Adam(0.01), 0.0, 0.0)
def _adam(w, g, t, m, v):
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
    rate = 0.01 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
    return -rate * m / (np.sqrt(v) + 1e-7), m, v


@_formula(lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1), 0.0, 0.0)
def _adamw(w, g, t, m, v):
    change, m, v = _adam(w, g, t, m, v)
    return change - 0.001 * w, m, v


@_formula(lambda: keras.optimizers.Adamax(0.01), 0.0, 0.0)
def _adamax(w, g, t, m, u):
    m, u = 0.9 * m + 0.1 * g, np.maximum(0.999 * u, np.abs(g))
    return -0.01 * m / ((1 - 0.9**t) * (u + 1e-7)), m, u


@_formula(lambda: keras.optimizers.RMSprop(0.01), 0.0)
def _rmsprop(w, g, t, v):
    v = 0.9 * v + 0.1 * g**2
    return -0.01 * g / np.sqrt(v + 1e-7), v


@_formula(lambda: keras.optimizers.Adadelta(0.01), 0.0, 0.0)
def _adadelta(w, g, t, a, d):
    a = 0.95 * a + 0.05 * g**2
    change = -g * np.sqrt(d + 1e-7) / np.sqrt(a + 1e-7)
    return 0.01 * change, a, 0.95 * d + 0.05 * change**2


@_formula(lambda: keras.optimizers.Lion(0.001), 0.0)
def _lion(w, g, t, m):
    return -0.001 * np.sign(0.9 * m + 0.1 * g), 0.99 * m + 0.01 * g


@_formula(
    lambda: keras.optimizers.Ftrl(0.01, l1_regularization_strength=0.01),
    *(0.1, 0.0),
)
def _ftrl(w, g, t, n, z):
    new = n + g**2
    z = z + g - (np.sqrt(new) - np.sqrt(n)) / 0.01 * w
    return (np.clip(z, -0.01, 0.01) - z) * 0.01 / np.sqrt(new) - w, new, z


@pytest.mark.parametrize("name", _FORMULAS)
def test_fifty_sparse_batches_by_formula(name):
    optimizer, initial, formula = _FORMULAS[name]
    rng = np.random.default_rng(4)
    start = rng.uniform(-0.05, 0.05, [40, DIM])
    updated = _Updated(optimizer(), start.astype("float32"))
    expected = [start, *(np.full_like(start, value) for value in initial)]
    assert list(updated.slots) == list(updated.rule.slots)
    for step in range(1, 51):
        rows = rng.choice(40, 8, replace=False)
        gradients = rng.normal(size=[8, DIM]).astype("float32")
        updated.rows(tf.constant(rows), gradients)
        before = [values[rows] for values in expected]
        change, *after = formula(
            before[0], gradients.astype("float64"), step, *before[1:]
        )
        for values, new in zip(
            expected, [before[0] + change, *after], strict=True
        ):
            values[rows] = new
    np.testing.assert_allclose(updated.variable, expected[0], rtol=0, atol=1e-6)
    # Rows that are not in the batch stay to the bit.
    kept = np.setdiff1d(np.arange(40), rows)
    others = [
        v.numpy()[kept] for v in (updated.variable, *updated.slots.values())
    ]
    updated.rows(tf.constant(rows, tf.int32), gradients)
    for value, variable in zip(
        others, (updated.variable, *updated.slots.values()), strict=True
    ):
        np.testing.assert_array_equal(variable.numpy()[kept], value)


def test_nadam_after_many_steps():
    """Its product of momenta follows from the step alone."""
    optimizer, start = keras.optimizers.Nadam(0.1, beta_1=0.9999), np.ones([1])
    variable = keras.Variable(start)
    optimizer.build([variable])

    @tf.function
    def train():
        for _ in tf.range(600):
            optimizer.apply([tf.constant([0.5])], [variable])

    train()
    rule = rules.UpdateRule(optimizer)
    found = rule.hyperparameters(tf.constant(599))["u_product"]
    np.testing.assert_allclose(found, optimizer._u_product, rtol=1e-4)


def test_weights_left_out_of_the_decay_keep_their_size():
    optimizer = keras.optimizers.SGD(0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    rule = rules.UpdateRule(optimizer)
    found = []
    for name in ("bias", "kernel"):
        variable = tf.Variable([[1.0]], name=name)
        hyper = rule.hyperparameters(tf.constant(0))
        rule.apply_rows(variable, {}, tf.constant([0]), tf.zeros([1, 1]), hyper)
        found.append(float(variable[0, 0]))
    assert found == pytest.approx([1.0, 0.95])


def test_no_update_of_a_row_is_lost_to_another_worker():
    """Two threads, as two workers have on a server."""
    optimizer = keras.optimizers.SGD(0.125, momentum=1.0)
    updated = _Updated(optimizer, np.zeros([3, 4096], "float32"))
    hyper = updated.rule.hyperparameters(tf.constant(0))
    rows, gradient = tf.constant([1]), tf.ones([1, 4096])
    update = updated.rule.in_turns(updated.variable, updated.slots)

    @tf.function(autograph=False)  # Python's own threads take turns.
    def run(number):
        def one(index):
            update(rows, gradient, hyper)
            return index + 1

        return tf.while_loop(lambda index: index < number, one, [0])

    run(tf.constant(0))
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        list(threads.map(run, [tf.constant(500)] * 2))
    # The momentum grows by one gradient with each.
    expected = np.zeros([3, 4096])
    expected[1] = -0.125 * 1000 * 1001 / 2
    np.testing.assert_array_equal(updated.variable, expected)


@pytest.mark.parametrize(
    "clip", [{"clipnorm": 0.5}, {"global_clipnorm": 0.5}, {"clipvalue": 0.2}]
)
def test_clipping_equals_keras_with_all_shards_as_one_gradient(clip):
    start, gradients = _start()
    optimizer = keras.optimizers.SGD(0.1, **clip)
    variables = [keras.Variable(start), keras.Variable(start[0])]
    whole, bias = tf.constant(gradients[0]), tf.constant(gradients[1][0]) * 1e-3
    optimizer.apply([whole, bias], variables)
    rows = [[0, 3], [1, 2, 5], [4]]
    shards = [
        tf.IndexedSlices(tf.gather(whole, r), tf.constant(r)) for r in rows
    ]
    *found, found_bias = rules.clip(
        optimizer, [*shards, bias], ["table", "table", "table", None]
    )
    np.testing.assert_allclose(
        variables[1].numpy(), start[0] - 0.1 * found_bias, rtol=1e-6
    )
    for slices, r in zip(found, rows, strict=True):
        np.testing.assert_array_equal(slices.indices, r)
        np.testing.assert_allclose(
            variables[0].numpy()[r], start[r] - 0.1 * slices.values, rtol=1e-6
        )


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda: keras.optimizers.Lamb(), "Adagrad, Adam, .*RMSprop.*Lamb"),
        (lambda: keras.optimizers.SGD(use_ema=True), "use_ema"),
    ],
)
@pytest.mark.parametrize("has_tables", [True, False])
def test_what_is_not_supported_is_refused_by_name(
    optimizer, message, has_tables
):
    with pytest.raises(ValueError, match=message) as error:
        rules.UpdateRule(optimizer(), has_tables=has_tables)
    assert ("Embedding" in str(error.value)) == has_tables
    assert ("With parameter servers" in str(error.value)) != has_tables
