"""Tests of predictions on file, their figures and their churn."""

import numpy as np
import pytest
from sklearn import metrics

from tfdistill.held_out import predictions
from tfdistill.recipes import outputs


def _classes(rng, labels):
    logits = rng.normal(size=[len(labels), 4])
    exact = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    return predictions.Distributions(probabilities=exact, labels=labels)


def _tokens(rng, labels):
    return predictions.LabelProbabilities(
        label_probabilities=rng.uniform(0.1, 0.9, len(labels)),
        predicted_labels=rng.integers(0, 4, len(labels)),
        labels=labels,
    )


def _values(rng, labels):
    values = labels + rng.normal(size=len(labels))
    return predictions.Values(values=values, labels=labels)


@pytest.mark.parametrize("make", [_classes, _tokens, _values])
def test_files_give_back_what_was_written(tmp_path, make):
    rng = np.random.default_rng(0)
    kept = make(rng, rng.integers(0, 4, 20))
    outputs.write_predictions(tmp_path, kept)
    found = predictions.read(tmp_path)
    assert type(found) is type(kept) and found.figures() == kept.figures()
    for name, array in kept.arrays().items():
        np.testing.assert_array_equal(found.arrays()[name], array)
    halves = [
        type(kept)(**{n: a[part] for n, a in kept.arrays().items()})
        for part in (slice(0, 7), slice(7, None))
    ]
    whole = predictions.concatenate(halves)
    assert whole.figures() == kept.figures()


def test_churn_of_tokens_is_that_of_the_true_ones(tmp_path):
    labels = np.array([3, 1])
    first, second = (
        predictions.LabelProbabilities(
            label_probabilities=np.array(chosen),
            predicted_labels=np.array(likeliest),
            labels=labels,
        )
        for chosen, likeliest in (([0.5, 0.2], [3, 0]), ([0.4, 0.6], [3, 1]))
    )
    churn = first.churn(second)
    assert churn["churn"] == pytest.approx(0.25)
    assert churn["label_churn"] == 0.5
    both = predictions.LabelProbabilities.mean([first, second])
    np.testing.assert_allclose(both.compared, [0.45, 0.4])
    assert "accuracy" not in both.figures()
    assert "label_churn" not in both.churn(first)
    assert "predicted_labels" not in both.arrays()
    outputs.write_predictions(tmp_path, both)
    assert predictions.read(tmp_path).figures() == both.figures()


def test_figures_of_a_regression_have_no_unit():
    rng = np.random.default_rng(3)
    labels = rng.normal(50.0, 4.0, 200)
    first, second = retrains = [_values(rng, labels) for _ in range(2)]
    found = first.figures()
    assert found["unexplained_variance"] == pytest.approx(
        1 - metrics.r2_score(labels, first.compared)
    )
    apart = np.abs(first.compared - second.compared).mean()
    assert first.churn(second)["churn"] == pytest.approx(apart / labels.std())
    (spread,) = predictions.Values.spread(retrains).values()
    assert spread == pytest.approx(apart / labels.std() / 2)
    cents, other = (
        predictions.Values(values=100 * x.compared, labels=100 * labels)
        for x in retrains
    )
    assert cents.figures() == pytest.approx(found)
    assert cents.churn(other) == pytest.approx(first.churn(second))


def test_spread_is_the_distance_to_the_mean_of_the_retrains():
    rng = np.random.default_rng(2)
    labels = rng.integers(0, 4, 30)
    retrains = [_classes(rng, labels) for _ in range(3)]
    spread = predictions.Distributions.spread(retrains)
    stacked = np.stack([one.probabilities for one in retrains])
    mean = stacked.mean(axis=0)
    expected = 0.5 * np.abs(stacked - mean).sum(-1).mean()
    assert spread["prediction_difference"] == pytest.approx(expected)
    rows = np.arange(30)
    chosen = stacked[:, rows, labels]
    relative = np.abs(chosen - chosen.mean(0)).mean(0) / chosen.mean(0)
    assert spread["relative_prediction_difference"] == pytest.approx(
        relative.mean()
    )
