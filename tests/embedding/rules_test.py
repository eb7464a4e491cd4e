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
NAMES = sorted(OPTIMIZERS)


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
        self.rule = rules.rule_for(optimizer)
        self.variable = tf.Variable(start)
        (self.slots,) = rules.make_slots(
            self.rule, [self.variable], tf.distribute.get_strategy()
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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("by_rows", [False, True])
def test_updates_equal_keras(name, by_rows):
    start, gradients = _start()
    updated = _Updated(OPTIMIZERS[name](), start)
    order = np.array([3, 0, 5, 1, 4, 2])
    for gradient in gradients:
        if by_rows:
            updated.rows(tf.constant(order), gradient[order])
        else:
            updated.dense(gradient)
    expected = _by_keras(OPTIMIZERS[name](), start, gradients)
    # TensorFlow's operation takes 1 - 0.999 in float32, 5e-5 off.
    tolerance = 1e-5 if name == "adam" and not by_rows else 2e-6
    np.testing.assert_allclose(
        updated.variable, expected, rtol=2e-5, atol=tolerance
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
def test_rows_that_are_not_named_stay_to_the_bit(name, dtype):
    start, gradients = _start()
    updated = _Updated(OPTIMIZERS[name](), start)
    slots = {k: v.numpy() for k, v in updated.slots.items()}
    touched, others = [4, 1], [0, 2, 3, 5]
    for gradient in gradients[:3]:
        updated.rows(tf.constant(touched, dtype), gradient[touched])
    np.testing.assert_array_equal(
        updated.variable.numpy()[others], start[others]
    )
    assert (updated.variable.numpy()[touched] != start[touched]).all()
    for key, before in slots.items():
        after = updated.slots[key].numpy()
        np.testing.assert_array_equal(after[others], before[others])
        assert (after[touched] != before[touched]).all()


def test_lazy_adam_by_formula():
    start, gradients = _start()
    updated = _Updated(OPTIMIZERS["adam"](), start)
    expected = start.astype("float64")
    m, v = np.zeros_like(expected), np.zeros_like(expected)
    for step, rows in enumerate([[0, 1], [1, 2], [0], [2, 1]], start=1):
        g = gradients[step][rows]
        updated.rows(tf.constant(rows), g)
        m[rows] = 0.9 * m[rows] + 0.1 * g
        v[rows] = 0.999 * v[rows] + 0.001 * g**2
        rate = 0.1 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        expected[rows] -= rate * m[rows] / (np.sqrt(v[rows]) + 1e-7)
    np.testing.assert_allclose(updated.variable, expected, rtol=1e-4, atol=1e-5)


def test_nadam_after_many_steps():
    """Its product of momenta follows from the step alone."""
    optimizer, start = keras.optimizers.Nadam(0.1, beta_1=0.9999), np.ones([1])
    variable = keras.Variable(start)
    for _ in range(600):
        optimizer.apply([tf.constant([0.5])], [variable])
    rule = rules.rule_for(optimizer)
    found = rule.hyperparameters(tf.constant(599))["u_product"]
    np.testing.assert_allclose(found, optimizer._u_product, rtol=1e-4)


def test_weights_left_out_of_the_decay_keep_their_size():
    optimizer = keras.optimizers.SGD(0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    rule = rules.rule_for(optimizer)
    found = []
    for name in ("bias", "kernel"):
        variable = tf.Variable([[1.0]], name=name)
        hyper = rule.hyperparameters(tf.constant(0))
        rule.apply_rows(variable, {}, tf.constant([0]), tf.zeros([1, 1]), hyper)
        found.append(float(variable[0, 0]))
    assert found == pytest.approx([1.0, 0.95])


def test_no_update_of_a_row_is_lost_to_another_worker():
    """Two threads, as two workers have on a server."""
    optimizer = keras.optimizers.RMSprop(0.125, rho=1.0, epsilon=1.0)
    updated = _Updated(optimizer, np.zeros([NUM_ROWS, DIM], "float32"))
    hyper = updated.rule.hyperparameters(tf.constant(0))
    rows, gradient = tf.constant([1, 4]), tf.ones([2, DIM])

    @tf.function
    def update():
        updated.rule.apply_rows(
            updated.variable, updated.slots, rows, gradient, hyper
        )

    def run(_):
        for _ in range(1000):
            update()

    update()
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        list(threads.map(run, range(2)))
    found = updated.variable.numpy()
    np.testing.assert_array_equal(found[[1, 4]], -0.125 * 2001)


_CLIPS = pytest.mark.parametrize(
    "clip", [{"clipnorm": 0.5}, {"global_clipnorm": 0.5}, {"clipvalue": 0.2}]
)


@_CLIPS
def test_clipping_equals_keras(clip):
    start, gradients = _start()
    optimizer = keras.optimizers.SGD(0.1, **clip)
    variables = [keras.Variable(start), keras.Variable(start[0])]
    given = [tf.constant(gradients[0]), tf.constant(gradients[1][0]) * 1e-3]
    clipped = rules.clip(optimizer, given)
    optimizer.apply(given, variables)
    for variable, gradient, before in zip(
        variables, clipped, [start, start[0]], strict=True
    ):
        np.testing.assert_allclose(
            variable.numpy(), before - 0.1 * gradient, rtol=1e-6
        )


@_CLIPS
def test_shards_of_a_table_are_clipped_as_one_gradient(clip):
    _, gradients = _start()
    optimizer = keras.optimizers.SGD(0.1, **clip)
    whole, bias = tf.constant(gradients[0]), tf.constant(gradients[1][0])
    expected = rules.clip(optimizer, [whole, bias])
    rows = [[0, 3], [1, 2, 5], [4]]
    shards = [
        tf.IndexedSlices(tf.gather(whole, r), tf.constant(r)) for r in rows
    ]
    *found, found_bias = rules.clip(
        optimizer, [*shards, bias], ["table", "table", "table", None]
    )
    np.testing.assert_allclose(found_bias, expected[1], rtol=1e-6)
    for slices, r in zip(found, rows, strict=True):
        np.testing.assert_array_equal(slices.indices, r)
        np.testing.assert_allclose(
            slices.values, expected[0].numpy()[r], rtol=1e-6
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
        rules.rule_for(optimizer(), has_tables=has_tables)
    assert ("Embedding" in str(error.value)) == has_tables
    assert ("With parameter servers" in str(error.value)) != has_tables
