"""Tests of losses, metrics and figures of each kind of prediction."""

import keras
import numpy as np
import pytest
from scipy import special

from tfdistill.held_out import objectives

_CLASSES = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
_CLICKS = keras.losses.BinaryCrossentropy(from_logits=True)


@pytest.mark.parametrize("loss", [_CLASSES, _CLICKS])
def test_losses_agree_with_the_figures(loss):
    objective = objectives.of(loss)
    rng = np.random.default_rng(0)
    is_click = objective is objectives.Clicks
    logits = rng.normal(size=[20, 1 if is_click else 3])
    labels = np.arange(20) % (2 if is_click else 3)
    shaped = labels.reshape(-1, 1) if is_click else labels
    expected = float(loss(shaped, logits))
    metric = objective.log_loss()
    metric.update_state(shaped, logits)
    assert float(metric.result()) == pytest.approx(expected, rel=1e-5)
    figures = objective.predictions(logits, labels).figures()
    assert figures["log_loss"] == pytest.approx(expected, rel=1e-5)


def test_probabilities_do_not_overflow():
    logits = np.array([[-1e4], [-1.0], [0.0], [1.0], [1e4]])
    with np.errstate(all="raise", under="ignore"):
        clicks = objectives.Clicks.predictions(logits, np.ones(5))
        classes = objectives.Classes.predictions(
            np.concatenate([0 * logits, logits], axis=1), np.ones(5)
        )
    expected = [0.0, 1 / (1 + np.e), 0.5, np.e / (1 + np.e), 1.0]
    np.testing.assert_allclose(clicks.probabilities, expected, atol=1e-15)
    np.testing.assert_allclose(
        classes.probabilities[:, 1], expected, atol=1e-15
    )


def test_tokens_keep_what_figures_need():
    rng = np.random.default_rng(2)
    logits, labels = rng.normal(size=[4, 5, 7]), rng.integers(0, 7, [4, 5])
    found = objectives.Classes.predictions(logits, labels)
    whole = objectives.Classes.predictions(
        logits.reshape(-1, 7), labels.reshape(-1)
    )
    ours = found.figures()
    theirs = whole.figures()
    assert ours["log_loss"] == pytest.approx(theirs["log_loss"], rel=1e-9)
    assert ours["accuracy"] == theirs["accuracy"]
    assert ours["perplexity"] == pytest.approx(np.exp(ours["log_loss"]))


@pytest.mark.parametrize("counts", [None, np.array([6, 0, 1])])
def test_smoothing_is_a_loss_of_soft_targets(counts):
    rng = np.random.default_rng(3)
    logits, labels = rng.normal(size=[8, 3]), rng.integers(0, 3, 8)
    prior = np.full(3, 1 / 3) if counts is None else np.array([7, 1, 2]) / 10
    targets = 0.8 * np.eye(3)[labels] + 0.2 * prior
    expected = -np.mean(
        np.sum(targets * np.log(special.softmax(logits, axis=-1)), axis=-1)
    )
    loss = objectives.smoothed(_CLASSES, weight=0.2, counts=counts)
    assert float(loss(labels, logits)) == pytest.approx(expected, rel=1e-5)
    # Clicks likewise.
    counts, prior = (None, 0.5) if counts is None else (np.array([2, 1]), 0.4)
    logits, labels = logits[:, :1], labels[:, None] % 2
    p = special.expit(logits)
    target = 0.8 * labels + 0.2 * prior
    expected = -np.mean(target * np.log(p) + (1 - target) * np.log(1 - p))
    loss = objectives.smoothed(_CLICKS, weight=0.2, counts=counts)
    assert float(loss(labels, logits)) == pytest.approx(expected, rel=1e-5)
