"""The figures of click models, against scikit-learn and by hand."""

import numpy as np
import pytest
import sklearn.metrics

from models import click_metrics


def examples(num_examples=500, *, rate=0.25, digits=6, seed=0):
    rng = np.random.default_rng(seed)
    labels = (rng.random(num_examples) < rate).astype(np.int64)
    scores = rng.normal(size=num_examples) + labels
    return labels, np.round(1 / (1 + np.exp(-scores)), digits)


@pytest.mark.parametrize("digits", [6, 1])
@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_auc_equals_scikit_learn_with_and_without_ties(digits, shape):
    labels, predictions = examples(digits=digits)
    expected = sklearn.metrics.roc_auc_score(labels, predictions)
    found = click_metrics.auc(labels.reshape(shape), predictions.reshape(shape))
    assert found == pytest.approx(expected, abs=1e-12)


def test_auc_sees_the_order_alone():
    labels, predictions = examples()
    value = click_metrics.auc(labels, predictions)
    assert click_metrics.auc(labels, predictions**3) == pytest.approx(value)
    assert click_metrics.auc(labels, 1 - predictions) == pytest.approx(
        1 - value
    )
    assert click_metrics.auc(labels, np.full(500, 0.3)) == 0.5
    assert click_metrics.auc(labels, labels.astype(float)) == 1.0


def test_normalized_entropy_by_its_formula():
    labels, p = examples()
    rate = labels.mean()
    loss = -np.mean(np.where(labels == 1, np.log(p), np.log(1 - p)))
    entropy = -rate * np.log(rate) - (1 - rate) * np.log(1 - rate)
    found = click_metrics.normalized_entropy(labels, p)
    assert found == pytest.approx(loss / entropy)
    mean = np.full(500, rate)
    assert click_metrics.normalized_entropy(labels, mean) == pytest.approx(1)


def test_calibration_compares_means():
    labels, p = examples()
    assert click_metrics.calibration(labels, p / 2) == pytest.approx(
        p.mean() / 2 / labels.mean()
    )


@pytest.mark.parametrize(
    ("labels", "predictions", "message"),
    [
        ([0, 0], [0.1, 0.2], "both 0 and 1; received 2 times 0"),
        ([0, 2], [0.1, 0.2], "`labels` must be whole numbers from 0 to 1"),
        ([0, 1], [0.1, 1.2], "must be probabilities"),
    ],
)
@pytest.mark.parametrize("name", ["auc"])
def test_wrong_arrays_are_refused(name, labels, predictions, message):
    with pytest.raises(ValueError, match=message):
        getattr(click_metrics, name)(labels, predictions)
