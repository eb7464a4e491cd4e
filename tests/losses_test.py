"""Distillation losses against NumPy, and the identities that must hold."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.cases import tiers
from tfdistill import losses

CATEGORICAL = [
    losses.SoftTargetCrossEntropy,
    losses.ForwardKL,
    losses.ReverseKL,
]
ALL = [
    *CATEGORICAL,
    losses.LogitsMeanSquaredError,
    losses.BinarySoftTargetCrossEntropy,
]
INF = float("inf")
NAN = float("nan")


def normal(*shape, seed=0, scale=2.0):
    return np.random.default_rng(seed).normal(size=shape) * scale


def softmax(x, temperature=1.0):
    x = x / temperature
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def sigmoid(x, temperature=1.0):
    return 1.0 / (1.0 + np.exp(-x / temperature))


def cross_entropy(p, q):
    return -(p * np.log(q)).sum(-1)


def kl(p, q):
    return (p * (np.log(p) - np.log(q))).sum(-1)


def binary_cross_entropy(p, q):
    return -(p * np.log(q) + (1 - p) * np.log(1 - q)).mean(-1)


def formula(cls, teacher, student, temperature):
    """The loss of one teacher, from logits, in float64."""
    p, q = softmax(teacher, temperature), softmax(student, temperature)
    bp, bq = sigmoid(teacher, temperature), sigmoid(student, temperature)
    squared = temperature**2
    return {
        "SoftTargetCrossEntropy": lambda: squared * cross_entropy(p, q),
        "ForwardKL": lambda: squared * kl(p, q),
        "ReverseKL": lambda: squared * kl(q, p),
        "LogitsMeanSquaredError": lambda: ((teacher - student) ** 2).mean(-1),
        "BinarySoftTargetCrossEntropy": lambda: (
            squared * binary_cross_entropy(bp, bq)
        ),
    }[cls.__name__]()


def make(cls, *, temperature=1.0, **kwargs):
    kwargs.setdefault("from_logits", True)
    return cls(temperature=temperature, **kwargs)


def value(loss, teachers, student, weights=None):
    weights = [1.0] * len(teachers) if weights is None else weights
    return loss.call(loss.aggregate(teachers, weights), student)


def gradient_of(loss, teachers, student, weights=None):
    """The loss of teachers, and its gradient to the student."""
    point = tf.Variable(student)
    with tf.GradientTape() as tape:
        got = value(loss, teachers, point, weights)
    return got, tf.cast(tape.gradient(got, point), "float32").numpy()


@pytest.mark.parametrize("shape", [(5, 4), (2, 3, 2, 4)])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("cls", ALL)
def test_values_by_formula(cls, temperature, shape):
    teacher, student = normal(*shape), normal(*shape, seed=1)
    got = value(make(cls, temperature=temperature), [teacher], student)
    assert got.shape == shape[:-1]
    assert got.dtype == tf.float32
    expected = formula(cls, teacher, student, temperature)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("cls", ALL)
def test_teachers_are_averaged_by_weight_as_what_the_loss_compares(cls):
    teachers = [normal(5, 4, seed=seed) for seed in range(3)]
    weights = np.array([1.0, 2.0, 5.0])
    given = {
        losses.LogitsMeanSquaredError: lambda x, _: x,
        losses.BinarySoftTargetCrossEntropy: sigmoid,
    }.get(cls, softmax)
    expected = np.average(
        [given(t, 2.0) for t in teachers], axis=0, weights=weights
    )
    got = make(cls, temperature=2.0).aggregate(teachers, weights)
    np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("cls", [*CATEGORICAL, ALL[-1]])
def test_probabilities_and_logits_agree(cls, temperature):
    activation = sigmoid if cls is ALL[-1] else softmax
    teachers = [normal(5, 4, seed=seed, scale=1.0) for seed in range(2)]
    student = normal(5, 4, seed=7, scale=1.0)
    from_logits = value(make(cls, temperature=temperature), teachers, student)
    from_probabilities = value(
        make(cls, from_logits=False, temperature=temperature),
        [activation(teacher) for teacher in teachers],
        activation(student),
    )
    np.testing.assert_allclose(
        from_logits, from_probabilities, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("cls", ALL)
def test_no_gradient_reaches_a_teacher(cls):
    teacher = tf.Variable(normal(4, 3))
    student = tf.Variable(normal(4, 3, seed=1))
    with tf.GradientTape() as tape:
        got = value(make(cls), [teacher], student)
    gradients = tape.gradient(got, [teacher, student])
    assert gradients[0] is None
    assert np.abs(gradients[1]).max() > 1e-3


@pytest.mark.parametrize("cls", ALL)
def test_gradient_by_finite_differences(cls):
    teacher, student = normal(3, 4), normal(3, 4, seed=1)
    loss = make(cls, temperature=1.7, dtype="float64")
    target = loss.aggregate([teacher], [1.0])
    point = tf.Variable(student)
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(loss.call(target, point))
    gradient = tape.gradient(total, point).numpy()
    for index in np.ndindex(student.shape):
        step = np.zeros_like(student)
        step[index] = 1e-5
        up = tf.reduce_sum(loss.call(target, student + step))
        down = tf.reduce_sum(loss.call(target, student - step))
        assert gradient[index] == pytest.approx(
            float(up - down) / 2e-5, rel=1e-5, abs=1e-8
        )


@pytest.mark.parametrize("bad", [NAN, tiers.deep(INF), tiers.deep(-INF)])
@pytest.mark.parametrize(
    ("cls", "from_logits"),
    [
        *((cls, True) for cls in ALL),
        *((cls, False) for cls in ALL if "Logits" not in cls.__name__),
    ],
)
def test_masked_teachers_do_not_leak(cls, from_logits, bad):
    loss = make(cls, from_logits=from_logits)
    raw = [normal(4, 3, seed=seed) for seed in range(3)]
    good, other, student = raw if from_logits else map(softmax, raw)
    broken = other.copy()
    broken[1] = bad
    weights = [[1.0] * 4, [1.0, 0.0, 1.0, 1.0]]
    values, gradient = gradient_of(loss, [good, broken], student, weights)
    alone = value(loss, [good], student)
    both = value(loss, [good, other], student)
    np.testing.assert_allclose(values[1], alone[1], rtol=1e-5)
    np.testing.assert_allclose(values[0], both[0], rtol=1e-5)
    assert np.isfinite(gradient).all()
    # A whole teacher can be left out too.
    values = value(loss, [good, np.full_like(good, bad)], student, [1.0, 0.0])
    np.testing.assert_allclose(values, alone, rtol=1e-5)


def test_rows_without_a_teacher_are_zeros_and_finite():
    student = normal(2, 3, seed=1)
    broken = tf.constant([[1.0, 2.0, 3.0], [NAN, NAN, NAN]])
    for loss in map(make, CATEGORICAL):
        target = loss.aggregate([broken], [[1.0, 0.0]])
        np.testing.assert_array_equal(target[1], np.zeros(3))
        got, gradient = gradient_of(loss, [broken], student, [[1.0, 0.0]])
        assert np.isfinite(got).all() and np.isfinite(gradient).all()


@pytest.mark.parametrize("cls", [*CATEGORICAL, losses.LogitsMeanSquaredError])
def test_classes_masked_by_minus_infinity_on_both_sides(cls):
    teacher, student = normal(3, 5), normal(3, 5, seed=1)
    masked_teacher, masked_student = teacher.copy(), student.copy()
    masked_teacher[:, 2] = masked_student[:, 2] = -INF
    kept = [0, 1, 3, 4]
    got, gradient = gradient_of(make(cls), [masked_teacher], masked_student)
    expected = formula(cls, teacher[:, kept], student[:, kept], 1.0)
    if cls is losses.LogitsMeanSquaredError:
        expected *= 4 / 5
    np.testing.assert_allclose(got, expected, rtol=1e-4)
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(gradient[:, 2], np.zeros(3))


@pytest.mark.parametrize("cls", [*CATEGORICAL, ALL[-1]])
def test_probabilities_of_exactly_zero_and_one_stay_finite(cls):
    teacher = tf.constant([[1.0, 0.0], [0.0, 1.0]])
    loss = make(cls, from_logits=False, temperature=2.0)
    agreed, gradient = gradient_of(loss, [teacher], teacher)
    assert np.isfinite(gradient).all()
    opposed, gradient = gradient_of(loss, [teacher], 1.0 - teacher)
    assert np.isfinite(gradient).all()
    assert np.max(agreed) < 0.2 < 10.0 < np.min(opposed)


@pytest.mark.parametrize(
    ("teacher_dtype", "student_dtype"),
    [
        ("float64", "float16"),
        tiers.deep("bfloat16", "float32"),
        tiers.deep("float16", "bfloat16"),
    ],
)
@pytest.mark.parametrize("cls", ALL)
def test_any_float_dtype(cls, teacher_dtype, student_dtype):
    teacher, student = normal(4, 30), normal(4, 30, seed=1)
    given = [tf.cast(teacher, teacher_dtype)]
    loss = make(cls)
    got, gradient = gradient_of(loss, given, tf.cast(student, student_dtype))
    assert loss.aggregate(given, [1.0]).dtype == got.dtype == tf.float32
    assert np.isfinite(gradient).all()
    np.testing.assert_allclose(
        got, formula(cls, teacher, student, 1.0), rtol=0.05, atol=0.02
    )


TOP_2 = functools.partial(losses.SoftTargetCrossEntropy, top_k=2)


@pytest.mark.parametrize("cls", [*ALL, TOP_2])
def test_serialisation_gives_the_same_loss(cls):
    loss = make(cls, temperature=2.0, name="mine", reduction="sum")
    copy = keras.losses.deserialize(keras.losses.serialize(loss))
    assert type(copy) is type(loss)
    assert copy.get_config() == loss.get_config()
    settled = cls(temperature=2.0, name="mine").with_from_logits(True)
    assert settled.get_config() == {
        **loss.get_config(),
        "reduction": "sum_over_batch_size",
    }
    teacher, student = normal(4, 3), normal(4, 3, seed=1)
    np.testing.assert_array_equal(
        value(copy, [teacher], student), value(loss, [teacher], student)
    )


@pytest.mark.parametrize("cls", ALL)
def test_unsettled_from_logits_is_refused_and_can_be_settled(cls):
    loss = cls(name="mine")
    with pytest.raises(ValueError, match="with_from_logits"):
        loss.aggregate([normal(2, 3)], [1.0])
    with pytest.raises(ValueError, match="with_from_logits"):
        loss.call(normal(2, 3), normal(2, 3))
    settled = loss.with_from_logits(True)
    assert loss.from_logits is None
    assert settled.from_logits is True
    assert settled.name == "mine"
    assert np.isfinite(value(settled, [normal(2, 3)], normal(2, 3))).all()


@pytest.mark.parametrize("cls", ALL)
def test_a_teacher_of_another_shape_never_broadcasts(cls):
    for shape in ((4, 1), (4, 9), (4,), (1, 10)):
        with pytest.raises(ValueError, match="outputs of the same shape"):
            make(cls).call(np.ones(shape), np.ones((4, 10)))


# ---- sparse soft targets ----


def top_k_formula(p, q, k):
    """Row by row, from probabilities in float64."""
    found = []
    for t, s in zip(p, q, strict=True):
        order = np.argsort(-t, kind="stable")
        top, rest = order[:k], order[k:]
        cost = -(t[top] * np.log(s[top])).sum()
        if len(rest):
            cost -= t[rest].sum() * np.log(s[rest].sum())
        found.append(cost)
    return np.array(found)


@pytest.mark.parametrize("k", [1, 3, 6])
def test_top_k_by_formula(k):
    teachers = [normal(4, 6, seed=seed) for seed in range(2)]
    student = normal(4, 6, seed=9)
    # Equal classes: only as many of them as there is room for.
    teachers[0][1] = teachers[1][1] = [0.0, 1.0, 1.0, 1.0, 1.0, -1.0]
    loss = losses.SoftTargetCrossEntropy(
        top_k=k, temperature=2.0, from_logits=True
    )
    p = (softmax(teachers[0], 2.0) + softmax(teachers[1], 2.0)) / 2
    expected = 4.0 * top_k_formula(p, softmax(student, 2.0), k)
    np.testing.assert_allclose(value(loss, teachers, student), expected, 2e-5)


def test_a_tail_without_mass_or_with_hardly_any():
    loss = losses.SoftTargetCrossEntropy(top_k=1, from_logits=True)
    student = tf.Variable([[200.0, 0.0, 1.0]] * 2)
    # 1 - 1e-30 is 1 in float32, and so is the student's first probability.
    target = tf.constant([[1.0, 0.0, 0.0], [1.0, 1e-30, 0.0]])
    with tf.GradientTape() as tape:
        got = loss.call(target, student)
    rest = 200.0 - np.log(1.0 + np.e)
    np.testing.assert_allclose(got, [0.0, 1e-30 * rest], rtol=1e-5)
    assert np.isfinite(tape.gradient(got, student)).all()
    wrong = loss.call([[0.0, 1.0, 0.0]], [[200.0, 0.0, 1.0]])
    np.testing.assert_allclose(wrong, [200.0], rtol=1e-5)


def test_sparse_targets_with_masks_and_no_teacher_stay_finite():
    loss = losses.SoftTargetCrossEntropy(top_k=2, from_logits=True)
    teacher, student = normal(5, 6), normal(5, 6, seed=1)
    teacher[:, 0] = student[:, 0] = -INF  # On both sides, and on one.
    teacher[1, 3] = student[2, 4] = -INF
    teacher[4, :5] = -INF  # One class is left.
    teacher[3] = NAN
    weights = [[1.0, 1.0, 1.0, 0.0, 1.0]]
    got, gradient = gradient_of(loss, [teacher], student, weights)
    assert np.isfinite(got).all() and np.isfinite(gradient).all()
    np.testing.assert_array_equal(gradient[:, 0], np.zeros(5))
    assert np.abs(gradient[[0, 1, 4]]).max(axis=-1).min() > 1e-3


def test_every_public_name_is_a_registered_loss():
    for name in losses.__all__:
        cls = getattr(losses, name)
        assert issubclass(cls, losses.DistillationLoss)
        registered = keras.saving.get_registered_name(cls)
        assert registered == f"tfdistill>{name}"


def test_a_temperature_schedule_gives_each_step_its_own():
    falling = keras.optimizers.schedules.PolynomialDecay(4.0, 10, 1.0)
    rng = np.random.default_rng(0)
    teacher, student = rng.normal(size=(2, 5, 3)).astype("float32")
    scheduled = losses.ForwardKL(temperature=falling, from_logits=True)
    again = keras.saving.deserialize_keras_object(
        keras.saving.serialize_keras_object(scheduled)
    )

    @tf.function
    def at(step, loss):
        with losses.at_step(step):
            target = loss.aggregate([teacher], tf.ones([1]))
            return loss(target, student)

    for loss in (scheduled, again, scheduled.with_from_logits(True)):
        for step, temperature in ((0, 4.0), (5, 2.5), (10, 1.0), (99, 1.0)):
            plain = losses.ForwardKL(temperature=temperature, from_logits=True)
            np.testing.assert_allclose(
                at(tf.constant(step, tf.int64), loss),
                plain(plain.aggregate([teacher], tf.ones([1])), student),
                rtol=1e-5,
            )
