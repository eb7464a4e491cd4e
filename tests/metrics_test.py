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


@pytest.mark.parametrize("shape", [(200, 4), (200,), (200, 1)])
def test_quality_equals_scikit_learn(shape):
    is_binary = shape[-1] != 4
    p = binary(200) if is_binary else probabilities(*shape)
    y = labels(200, num_classes=2 if is_binary else 4)
    likeliest = p > 0.5 if is_binary else p.argmax(-1)
    given = y[:, None] if shape == (200, 1) else y
    assert metrics.quality(given, p.reshape(shape)) == pytest.approx(
        {
            "accuracy": sklearn.metrics.accuracy_score(y, likeliest),
            "log_loss": sklearn.metrics.log_loss(y, p),
        }
    )


def test_positions_count_one_by_one():
    p, y = probabilities(5, 3, 4), labels(5, 3, num_classes=4)
    flat_p, other = p.reshape(15, 4), probabilities(5, 3, 4, seed=1)
    assert metrics.quality(y, p) == pytest.approx(
        metrics.quality(y.reshape(15), flat_p)
    )
    assert metrics.churn(p, other) == pytest.approx(
        metrics.churn(flat_p, other.reshape(15, 4))
    )


def test_log_loss_of_certain_mistakes_is_finite():
    for mistake in (([0], [[0.0, 1.0]]), ([1.0], [0.0])):
        found = metrics.quality(*mistake)["log_loss"]
        assert found == pytest.approx(-np.log(1e-7))


def test_churn_by_formula():
    p, q = binary(50), binary(50, seed=1)
    expected = {
        "churn": np.abs(p - q).mean(),
        "label_churn": ((p > 0.5) != (q > 0.5)).mean(),
    }
    two_classes = [np.stack([1 - each, each], axis=-1) for each in (p, q)]
    for pair in ((p, q), (p[:, None], q[:, None]), two_classes):
        assert metrics.churn(*pair) == pytest.approx(expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tensors_of_any_float_dtype(dtype):
    logits = np.random.default_rng(0).normal(size=(30, 100))
    p = tf.nn.softmax(tf.cast(logits, dtype))
    assert metrics.churn(p, p)["label_churn"] == 0.0
    y = logits.argmax(-1)
    assert metrics.quality(y, p) == pytest.approx(
        metrics.quality(y, tf.nn.softmax(logits)), rel=0.01
    )


@pytest.mark.parametrize(
    ("predictions", "message"),
    [
        ([[0.5, np.nan]], r"\[0, 1\]; received nan at \(0, 1\).*softmax"),
        ([[0.4, 0.4]], "must each sum to one; .* off by up to 0.2"),
        (np.zeros((0, 3)), r"received shape \(0, 3\)"),
    ],
)
def test_what_is_no_probability_is_refused(predictions, message):
    with pytest.raises(ValueError, match=message):
        metrics.churn(predictions, predictions)
    with pytest.raises(ValueError, match=message):
        metrics.quality(np.zeros(len(np.atleast_1d(predictions))), predictions)


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
    with pytest.raises(ValueError, match=message):
        metrics.quality(given, probabilities(2, 3))


def test_models_of_other_examples_or_classes_are_refused():
    for other in (probabilities(3, 4), probabilities(2, 3), binary(3)):
        with pytest.raises(ValueError, match="received shapes"):
            metrics.churn(probabilities(3, 3), other)
    with pytest.raises(ValueError, match=r"shapes \(3,\) and \(4,\)"):
        metrics.churn(binary(3), binary(4))


def test_figures_of_clicks_by_their_formulas():
    rng = np.random.default_rng(3)
    y = (rng.random(500) < 0.25).astype(np.int64)
    p = 1 / (1 + np.exp(-rng.normal(size=500) - y))
    found = metrics.click_quality(y, p)
    pairs = p[y == 1][:, None] - p[y == 0]
    rate = y.mean()
    loss = -np.mean(np.where(y == 1, np.log(p), np.log(1 - p)))
    entropy = -rate * np.log(rate) - (1 - rate) * np.log(1 - rate)
    assert found == {
        "auc": pytest.approx(np.mean(pairs > 0)),
        "calibration": pytest.approx(p.mean() / rate),
        "log_loss": pytest.approx(loss),
        "normalized_entropy": pytest.approx(loss / entropy),
    }
    with pytest.raises(ValueError, match="both 0 and 1; received 2 times 0"):
        metrics.click_quality(np.array([0, 0]), np.array([0.1, 0.2]))


def test_figures_of_examples_have_the_means_of_all():
    for p, other, y in (
        (
            probabilities(9, 4),
            probabilities(9, 4, seed=1),
            labels(9, num_classes=4),
        ),
        (binary(9), binary(9, seed=1), labels(9, num_classes=2)),
    ):
        losses, apart = metrics.log_losses(y, p), metrics.distances(p, other)
        assert losses.shape == apart.shape == (9,)
        assert losses.mean() == metrics.quality(y, p)["log_loss"]
        assert apart.mean() == pytest.approx(metrics.churn(p, other)["churn"])
