"""How far teachers and student agree, by hand."""

import codistillation_cases as cases
import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tfdistill import distillation_term
from tfdistill import prediction_agreement
from tfdistill import soft_targets

NAN = float("nan")


def _compare(student, teachers, *, loss, weights=None, sample_weight=None):
    """One output; the student's and each teacher's values are lists."""
    student = tf.constant(student, tf.float32)
    if weights is None:
        weights = np.ones([len(teachers), student.shape[0]])
    soft = soft_targets.SoftTargets(
        outputs=[[tf.constant(t, tf.float32) for t in teachers]],
        weights=tf.constant(weights, tf.float32),
        shares=tf.ones([len(teachers)]),
        staleness=tf.constant(0.0),
    )
    term = distillation_term.DistillationTerm(loss, task_loss="mse")
    kind, values = term.compare(soft, student, sample_weight)
    return kind, values.numpy().tolist()


def _softmax(**kwargs):
    return tfdistill.losses.SoftTargetCrossEntropy(from_logits=True, **kwargs)


def test_classes_are_compared_by_the_highest_value():
    kind, found = _compare(
        [[3, 1], [0, 1], [0, 1], [5, 2]],
        [[[9, 0], [7, 1], [0, 1], [0, 0.1]], [[9, 0], [0, 1], [0, 1], [1, 0]]],
        loss=_softmax(),
    )
    assert kind == prediction_agreement.AGREEMENT
    assert found == [0.5, 1.0]


@pytest.mark.parametrize(
    ("from_logits", "student", "teacher"),
    [
        (True, [[-1.0], [2.0], [0.1], [3.0]], [[-3.0], [1.0], [-0.1], [9.0]]),
        (False, [[0.1], [0.9], [0.6], [0.7]], [[0.4], [0.8], [0.4], [0.9]]),
        (False, [0.1, 0.9, 0.6, 0.7], [0.4, 0.8, 0.4, 0.9]),
    ],
)
def test_yes_or_no_is_compared_by_the_side(from_logits, student, teacher):
    loss = tfdistill.losses.BinarySoftTargetCrossEntropy(
        from_logits=from_logits
    )
    kind, found = _compare(student, [teacher], loss=loss)
    assert (kind, found) == (prediction_agreement.AGREEMENT, [0.75])


def test_values_are_compared_by_their_distance():
    loss = tfdistill.losses.LogitsMeanSquaredError(from_logits=True)
    kind, found = _compare([[1.0], [2.0]], [[[0.0], [5.0]]], loss=loss)
    assert (kind, found) == (prediction_agreement.DIFFERENCE, [2.0])


def test_who_says_nothing_is_nan_and_spoils_no_other():
    rows = [[3, 1], [0, 1]]
    _, found = _compare(
        rows,
        [[[NAN, NAN], [0, 1]], rows, rows],
        weights=[[0, 1], [0, 0], [2, 2]],
        loss=_softmax(),
    )
    np.testing.assert_equal(found, [1.0, NAN, 1.0])


@pytest.mark.parametrize("weight", [[1, 0, 1], [[1], [0], [1]]])
def test_examples_of_weight_0_do_not_count(weight):
    _, found = _compare(
        [[3, 1], [0, 1], [0, 1]],
        [[[3, 1], [1, 0], [1, 0]]],
        sample_weight=tf.constant(weight, tf.float32),
        loss=_softmax(),
    )
    assert found == [0.5]


def test_positions_of_weight_0_do_not_count():
    student = [[[1, 0], [1, 0], [0, 1]]]
    teacher = [[[1, 0], [0, 1], [1, 0]]]
    for weight, expected in (
        (None, 1 / 3),
        (tf.constant([[1.0, 1.0, 0.0]]), 0.5),
        (tf.constant([1.0]), 1 / 3),
    ):
        _, found = _compare(
            student, [teacher], sample_weight=weight, loss=_softmax()
        )
        assert found == pytest.approx([expected])


def test_masked_positions_do_not_count():
    student = tf.constant([[[1.0, 0], [1, 0], [0, 1]]])
    student._keras_mask = tf.constant([[True, True, False]])
    soft = soft_targets.SoftTargets(
        outputs=[[tf.constant([[[1.0, 0], [0, 1], [1, 0]]])]],
        weights=tf.ones([1, 1]),
        shares=tf.ones([1]),
        staleness=tf.constant(0.0),
    )
    term = distillation_term.DistillationTerm(_softmax(), task_loss="mse")
    assert term.compare(soft, student, None)[1].numpy().tolist() == [0.5]


def test_a_regression_writes_its_own_tag(tmp_path):
    import event_cases

    exchange = tfdistill.Exchange(tmp_path / "exchange")
    x, _ = cases.data()
    model = tfdistill.CodistillModel(
        cases.linear(0, classes=1), teachers=cases.teacher_set(exchange)
    )
    model.compile(
        keras.optimizers.SGD(0.0),
        "mse",
        distillation_loss=tfdistill.losses.LogitsMeanSquaredError(
            from_logits=True
        ),
    )
    y = x[:, :1]
    cases.prepare(model, x, y)
    teacher = cases.linear(1, classes=1)
    cases.publish(exchange, teacher, step=10)
    cases.load(model, 10)
    summaries = tfdistill.Summaries(tmp_path / "log", every_steps=2)
    model.fit(
        x, y, batch_size=8, verbose=0, callbacks=[cases.never(), summaries]
    )
    ((_, found),) = event_cases.scalars(
        tmp_path / "log", "teachers/group_1/mean_absolute_difference"
    )
    expected = np.abs(teacher(x) - model.student(x)).mean()
    assert found == pytest.approx(expected, rel=1e-5)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
