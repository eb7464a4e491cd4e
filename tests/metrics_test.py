"""Figures of quality and churn against their formulas in NumPy."""

import numpy as np
import pytest
import sklearn.metrics
import tensorflow as tf

from tfdistill import metrics


def probabilities(*shape, seed=0):
    logits = np.random.default_rng(seed).normal(size=shape)
    return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


def labels(*shape, num_classes, seed=5):
    return np.random.default_rng(seed).integers(num_classes, size=shape)


def binary(num_examples, seed=0):
    return np.random.default_rng(seed).uniform(size=num_examples)


def test_multiclass_equals_scikit_learn():
    p, y = probabilities(200, 4), labels(200, num_classes=4)
    assert metrics.accuracy(y, p) == pytest.approx(
        sklearn.metrics.accuracy_score(y, p.argmax(-1))
    )
    assert metrics.log_loss(y, p) == pytest.approx(
        sklearn.metrics.log_loss(y, p)
    )


@pytest.mark.parametrize("shape", [(200,), (200, 1)])
def test_binary_equals_scikit_learn(shape):
    p, y = binary(200), labels(200, num_classes=2)
    given = p.reshape(shape)
    assert metrics.accuracy(y.reshape(shape), given) == pytest.approx(
        sklearn.metrics.accuracy_score(y, p > 0.5)
    )
    assert metrics.log_loss(y.reshape(shape), given) == pytest.approx(
        sklearn.metrics.log_loss(y, p)
    )


def test_positions_count_one_by_one():
    p, y = probabilities(5, 3, 4), labels(5, 3, num_classes=4)
    flat_p, flat_y = p.reshape(15, 4), y.reshape(15)
    other = probabilities(5, 3, 4, seed=1)
    for metric in (metrics.accuracy, metrics.log_loss):
        assert metric(y, p) == pytest.approx(metric(flat_y, flat_p))
    for metric in (metrics.label_churn, metrics.mean_absolute_churn):
        assert metric(p, other) == pytest.approx(
            metric(flat_p, other.reshape(15, 4))
        )


def test_log_loss_of_certain_mistakes_is_finite():
    assert metrics.log_loss([0], [[0.0, 1.0]]) == pytest.approx(-np.log(1e-7))
    assert metrics.log_loss([1.0], [0.0]) == pytest.approx(-np.log(1e-7))
    assert metrics.log_loss([0], [0.0]) == pytest.approx(0.0, abs=1e-6)
    assert metrics.log_loss([0], [0.0], epsilon=0.1) == pytest.approx(
        -np.log(0.9)
    )


def test_churn_by_formula():
    p, q = binary(50), binary(50, seed=1)
    expected = np.abs(p - q).mean()
    assert metrics.mean_absolute_churn(p, q) == pytest.approx(expected)
    as_column = metrics.mean_absolute_churn(p[:, None], q[:, None])
    assert as_column == pytest.approx(expected)
    two_classes = [np.stack([1 - each, each], axis=-1) for each in (p, q)]
    assert metrics.mean_absolute_churn(*two_classes) == pytest.approx(expected)
    changed = ((p > 0.5) != (q > 0.5)).mean()
    assert metrics.label_churn(p, q) == pytest.approx(changed)
    assert metrics.label_churn(*two_classes) == pytest.approx(changed)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tensors_of_any_float_dtype(dtype):
    logits = np.random.default_rng(0).normal(size=(30, 100))
    p = tf.nn.softmax(tf.cast(logits, dtype))
    assert metrics.label_churn(p, p) == 0.0
    y = logits.argmax(-1)
    assert metrics.log_loss(y, p) == pytest.approx(
        metrics.log_loss(y, tf.nn.softmax(logits)), rel=0.01
    )


@pytest.mark.parametrize(
    ("predictions", "message"),
    [
        ([[0.5, np.nan]], r"\[0, 1\]; received nan at \(0, 1\).*softmax"),
        ([[0.4, 0.4]], "must sum to one; .* off by up to 0.2"),
        (np.zeros((0, 3)), r"received shape \(0, 3\)"),
    ],
)
def test_what_is_no_probability_is_refused(predictions, message):
    with pytest.raises(ValueError, match=message):
        metrics.label_churn(predictions, predictions)
    with pytest.raises(ValueError, match=message):
        metrics.log_loss(np.zeros(len(np.atleast_1d(predictions))), predictions)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([0, 1, 2], r"shape \(2,\) .* received \(3,\)"),
        ([[1, 0], [0, 1]], "One-hot labels: pass their argmax"),
        ([0, 3], "whole numbers from 0 to 2; received values from 0 to 3"),
        ([0, np.nan], "whole numbers"),
    ],
)
def test_labels_that_do_not_fit_are_refused(given, message):
    p = probabilities(2, 3)
    for metric in (metrics.accuracy, metrics.log_loss):
        with pytest.raises(ValueError, match=message):
            metric(given, p)


def test_models_of_other_examples_or_classes_are_refused():
    for other in (probabilities(3, 4), probabilities(2, 3), binary(3)):
        with pytest.raises(ValueError, match="received shapes"):
            metrics.mean_absolute_churn(probabilities(3, 3), other)
