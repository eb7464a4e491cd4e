"""What a step pays for differing from its teachers."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.cases import codistillation as cases
from tfdistill import losses
from tfdistill.teachers import soft_targets
from tfdistill.teachers import term as term_lib
from tfdistill.training import global_batch


def _of_outputs(*outputs, weights=None, shares=None):
    """For each output, by teacher. `weights` by teacher and example."""
    outputs = [[tf.constant(t, tf.float32) for t in said] for said in outputs]
    count, batch = len(outputs[0]), outputs[0][0].shape[0]
    weights = [[1.0] * batch] * count if weights is None else weights
    return soft_targets.SoftTargets(
        outputs=outputs,
        weights=tf.constant(weights, tf.float32),
        shares=tf.constant(shares or [1.0] * count, tf.float32),
        steps=tf.zeros([count], tf.int64),
        staleness=tf.constant(0.0),
    )


def _soft(*teachers, **kwargs):
    """One output."""
    return _of_outputs(teachers, **kwargs)


def _term(loss, task_loss=None, **kwargs):
    term = term_lib.DistillationTerm(loss, task_loss=task_loss, **kwargs)

    def settled(soft, outputs, sample_weight):
        term.settle(outputs, [""] * len(keras.tree.flatten(outputs)))
        return term(soft, outputs, sample_weight)

    return settled


def _cross_entropy(target, logits):
    return -(target * np.log(cases.softmax(logits))).sum(-1)


_RNG = np.random.default_rng(3)
_A, _B, _STUDENT = _RNG.normal(size=(3, 4, 3)).astype("float32")


def test_a_fading_teacher_leaves_each_example_what_it_counts():
    """The first has grown old and the second speaks of two examples only."""
    term = _term(losses.SoftTargetCrossEntropy(from_logits=True))
    weights = [[0.25] * 4, [1, 1, 0, 0]]
    soft = _soft(_A, _B, weights=weights, shares=[0.25, 1.0])
    assert float(soft.strength) == 1.0
    a, b = cases.softmax(_A), cases.softmax(_B)
    target = np.concatenate([(a[:2] + 4 * b[:2]) / 5, a[2:]])
    counts = np.array([1.0, 1.0, 0.25, 0.25])
    expected = (_cross_entropy(target, _STUDENT) * counts).mean()
    np.testing.assert_allclose(
        float(term(soft, _STUDENT, None)), expected, rtol=1e-5
    )


def test_weights_by_position_are_masked_by_example():
    """Sequences: outputs [batch, time, classes], weights [batch, time]."""
    term = _term(losses.SoftTargetCrossEntropy(from_logits=True))
    teacher, student = _RNG.normal(size=(2, 2, 5, 3)).astype("float32")
    weight = _RNG.uniform(size=(2, 5))
    found = float(
        term(_soft(teacher, weights=[[1.0, 0.0]]), student, tf.constant(weight))
    )
    values = _cross_entropy(cases.softmax(teacher), student) * weight
    np.testing.assert_allclose(found, values[0].sum() / 10, rtol=1e-5)


@pytest.mark.parametrize(
    ("reduction", "divisor"),
    [("sum_over_batch_size", 4), ("mean_with_sample_weight", 2)],
)
def test_sequences_are_masked_by_example_without_weights(reduction, divisor):
    """Also where there are as many positions as examples."""
    loss = losses.SoftTargetCrossEntropy(from_logits=True, reduction=reduction)
    teacher, student = _RNG.normal(size=(2, 2, 2, 3)).astype("float32")
    soft = _soft(teacher, weights=[[1.0, 0.0]])
    values = _cross_entropy(cases.softmax(teacher), student)[0]
    found = float(_term(loss)(soft, student, None))
    np.testing.assert_allclose(found, values.sum() / divisor, rtol=1e-5)


def _two_outputs():
    soft = _of_outputs([_A], [_B])
    first = _cross_entropy(cases.softmax(_A), _STUDENT).mean()
    second = _cross_entropy(cases.softmax(_B), _STUDENT).mean()
    return soft, first, second


@pytest.mark.parametrize(
    ("spec", "shares"),
    [("one", (1, 1)), (["one", None], (1, 0)), ({"b": "one"}, (0, 1))],
    ids=str,
)
@pytest.mark.parametrize("structure", [dict, list])
def test_a_loss_for_each_output(spec, shares, structure):
    def make(part):
        loss = losses.SoftTargetCrossEntropy(from_logits=True)
        if isinstance(part, dict):
            return {key: make(value) for key, value in part.items()}
        if isinstance(part, list):
            return [make(value) for value in part]
        return loss if part else None

    soft, first, second = _two_outputs()
    outputs = {"a": _STUDENT, "b": _STUDENT}
    if structure is list:
        outputs = list(outputs.values())
    found = float(
        _term(make(spec), output_names=["a", "b"])(soft, outputs, None)
    )
    expected = shares[0] * first + shares[1] * second
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("weights", [{"a": 0.5, "b": 3.0}, [0.5, 3.0]])
def test_loss_weights_by_output(weights):
    soft, first, second = _two_outputs()
    loss = losses.SoftTargetCrossEntropy(from_logits=True)
    term = _term(loss, weights=weights)
    found = float(term(soft, {"a": _STUDENT, "b": _STUDENT}, None))
    np.testing.assert_allclose(found, 0.5 * first + 3 * second, rtol=1e-5)


def test_sample_weights_by_output():
    soft, first, second = _two_outputs()
    loss = losses.SoftTargetCrossEntropy(from_logits=True)
    weights = {"a": tf.zeros([4]), "b": tf.fill([4], 3.0)}
    outputs = {"a": _STUDENT, "b": _STUDENT}
    found = float(_term(loss)(soft, outputs, weights))
    np.testing.assert_allclose(found, 3 * second, rtol=1e-5)
    found = float(_term(loss)(soft, outputs, {"a": None, "b": weights["b"]}))
    np.testing.assert_allclose(found, first + 3 * second, rtol=1e-5)


def _scce(from_logits):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=from_logits)


@pytest.mark.parametrize(
    ("task_loss", "expected"),
    [
        (lambda: _scce(True), True),
        (lambda: _scce(False), False),
        (lambda: {"a": _scce(True), "b": "mse"}, True),
    ],
)
def test_from_logits_follows_the_task_loss(task_loss, expected):
    wrapped = global_batch.over_global_batch(task_loss())
    term = _term(losses.SoftTargetCrossEntropy(), task_loss=wrapped)
    probabilities = cases.softmax(_A)
    given = _A if expected else probabilities
    student = _STUDENT if expected else cases.softmax(_STUDENT)
    value = float(term(_soft(given), student, None))
    np.testing.assert_allclose(
        value, _cross_entropy(probabilities, _STUDENT).mean(), rtol=1e-4
    )


def test_each_output_follows_its_own_task_loss():
    task = {"a": _scce(True), "b": _scce(False)}
    loss = losses.SoftTargetCrossEntropy
    term = _term({"a": loss(), "b": loss()}, task_loss=task)
    soft = _of_outputs([_A], [cases.softmax(_B)])
    _, first, second = _two_outputs()
    outputs = {"a": _STUDENT, "b": cases.softmax(_STUDENT)}
    np.testing.assert_allclose(
        float(term(soft, outputs, None)), first + second, rtol=1e-4
    )


_LOSS = losses.SoftTargetCrossEntropy(from_logits=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        # Keys need names.
        ({"loss": {"a": _LOSS}}, "or a list if these"),
        ({"loss": [_LOSS]}, "each of 2 outputs; received 1"),
        (
            {"loss": _LOSS, "weights": {"c": 1.0}},
            "distillation_output_weights",
        ),
        ({"loss": "kl_divergence"}, "tfdistill.losses"),
        ({"loss": losses.ForwardKL(), "task_loss": "mse"}, "from_logits=True"),
        (
            {
                "loss": losses.ForwardKL(),
                "task_loss": [_scce(True), _scce(False)],
            },
            "from_logits=True",
        ),
    ],
)
def test_losses_that_do_not_fit_are_refused(given, message):
    given = dict(given)
    if "task_loss" in given:
        task_loss = global_batch.over_global_batch(given["task_loss"])
        given["task_loss"] = task_loss
    soft, _, _ = _two_outputs()
    with pytest.raises(ValueError, match=message):
        _term(**given)(soft, [_STUDENT, _STUDENT], None)
