"""The teachers' answers to one batch, and what each is worth."""

import numpy as np
import pytest
import tensorflow as tf

from tfdistill import losses
from tfdistill.teachers import soft_targets
from tfdistill.teachers import teacher as teacher_lib

_NAN = float("nan")


class _Said(teacher_lib.Teacher):
    """Answers what it is told to, at each step."""

    answer = None

    def ask(self, batch):
        return self.answer(batch.inputs)


def _asked(*standings, weights=(1.0, 1.0)):
    """Teachers, each of a step and a share, and these."""
    teachers = [_Said(weight=w) for w in weights[: len(standings)]]
    table = [[*each, np.inf] for each in standings]
    return teachers, tf.constant(table, tf.float64)


def _constant(*rows):
    return lambda inputs: [tf.constant(rows, tf.float32)]


def _ask(asked, *answers, step=20, active=True):
    for teacher, answer in zip(asked[0], answers, strict=True):
        teacher.answer = answer
    return soft_targets.ask(
        *asked,
        teacher_lib.Batch(
            inputs=tf.zeros([2, 4]),
            outputs=tf.zeros([2, 1]),
            step=tf.constant(step, tf.int64),
        ),
        active=tf.constant(active),
    )


def test_teachers_in_use_are_asked_and_weighted():
    asked = _asked((10, 1), (12, 1), weights=[1.0, 3.0])
    soft = _ask(asked, _constant([1.0], [2.0]), _constant([5.0], [6.0]))
    np.testing.assert_array_equal(soft.outputs[0][0], [[1], [2]])
    np.testing.assert_array_equal(soft.outputs[0][1], [[5], [6]])
    np.testing.assert_array_equal(soft.weights, [[1, 1], [3, 3]])
    assert float(soft.staleness) == ((20 - 10) + (20 - 12)) / 2


@pytest.mark.parametrize(
    ("share", "active"), [(0, True), (_NAN, True), (1, False)]
)
def test_a_teacher_that_is_not_used_is_not_run(share, active):
    runs = tf.Variable(0)

    def teacher(inputs):
        runs.assign_add(1)
        return [tf.fill([2, 1], _NAN)]

    asked = _asked((10, share), (10, 1))

    @tf.function
    def step():
        return _ask(
            asked, teacher, _constant([5.0], [6.0]), active=active
        ).weights

    weights = step().numpy()
    assert runs.numpy() == 0
    np.testing.assert_array_equal(weights[0], [0, 0])
    np.testing.assert_array_equal(weights[1], [active, active])


def test_a_teacher_that_fades_hands_over_to_the_others():
    asked = _asked((10, 0.25), (18, 1), weights=[2.0, 1.0])
    first, second = _constant([1.0], [2.0]), _constant([3.0], [_NAN])
    soft = _ask(asked, first, second, step=18)
    np.testing.assert_array_equal(soft.shares, [0.25, 1])
    np.testing.assert_array_equal(soft.weights, [[0.5, 0.5], [1, 0]])
    np.testing.assert_array_equal(soft.share_of_rows, [1, 0.25])


def test_a_row_is_bad_if_any_output_is():
    asked = _asked((10, 1))
    (teacher,) = asked[0]
    teacher.answer = lambda _: [tf.ones([2, 3]), tf.constant([_NAN, 1.0])]
    soft = soft_targets.ask(
        *asked,
        teacher_lib.Batch(
            inputs=tf.zeros([2, 4]),
            outputs=[tf.zeros([2, 3]), tf.zeros([2])],
            step=tf.constant(20, tf.int64),
        ),
        active=tf.constant(True),
    )
    np.testing.assert_array_equal(soft.weights, [[0, 1]])


@pytest.mark.parametrize("is_distilled", [False, True])
@pytest.mark.parametrize(
    ("output", "kind"),
    [
        (lambda: tf.constant(["a", "b"]), "an EagerTensor of string"),
        (lambda: tf.ragged.constant([[1.0], []]), "a RaggedTensor of float32"),
        (lambda: tf.constant(3.0), "one number for the whole batch"),
        (lambda: None, "None"),
    ],
)
def test_what_is_no_row_of_numbers_is_left_out(output, kind, is_distilled):
    teachers, table = _asked((10, 1))
    output = output()
    outputs = {"a": tf.zeros([2, 1]), "b": output}
    teachers[0].answer = lambda inputs: [tf.constant([[1.0], [_NAN]]), output]
    loss = losses.LogitsMeanSquaredError(from_logits=True)
    batch = teacher_lib.Batch(
        inputs=tf.zeros([2, 4]),
        outputs=outputs,
        step=tf.constant(20, tf.int64),
        losses=[loss, loss if is_distilled else None],
    )
    active = tf.constant(True)
    if is_distilled:
        with pytest.raises(ValueError, match=f"received {kind} for 'b'. Pass"):
            soft_targets.ask(teachers, table, batch, active=active)
        return
    if output is None:
        teachers[0].answer = _constant([1.0], [_NAN])
    soft = soft_targets.ask(teachers, table, batch, active=active)
    np.testing.assert_array_equal(soft.outputs[0][0], [[1], [_NAN]])
    np.testing.assert_array_equal(soft.outputs[1][0], [0, 0])
    np.testing.assert_array_equal(soft.weights, [[1, 0]])
