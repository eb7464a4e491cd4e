import keras
import numpy as np
import pytest

from launch import config_sections as sections
from launch import objectives
from tfdistill import click_metrics


def test_each_data_set_has_an_objective():
    assert set(objectives.OBJECTIVES) == set(sections.MODELS.values())


@pytest.mark.parametrize("name", sorted(objectives.OBJECTIVES))
def test_losses_are_of_logits_and_agree_with_the_figures(name):
    objective = objectives.of(name)
    rng = np.random.default_rng(0)
    is_click = isinstance(objective, objectives.Clicks)
    logits = rng.normal(size=[20, 1 if is_click else 3])
    labels = np.arange(20) % (2 if is_click else 3)
    probabilities = objective.probabilities(logits)
    loss = objective.loss()(labels.reshape(-1, 1), logits)
    figures = objective.figures(labels, probabilities)
    assert figures["log_loss"] == pytest.approx(float(loss), rel=1e-5)


def test_probabilities_do_not_overflow():
    logits = np.array([[-1e4], [-1.0], [0.0], [1.0], [1e4]])
    with np.errstate(all="raise", under="ignore"):
        found = objectives.Clicks().probabilities(logits)
        classes = objectives.Classes().probabilities(
            np.concatenate([0 * logits, logits], axis=1)
        )
    expected = [0.0, 1 / (1 + np.e), 0.5, np.e / (1 + np.e), 1.0]
    np.testing.assert_allclose(found, expected, atol=1e-15)
    np.testing.assert_allclose(classes[:, 1], expected, atol=1e-15)


def test_the_auc_that_fit_logs_is_the_one_of_the_figures():
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 2, size=500)
    logits = rng.normal(size=[500, 1]) + labels[:, np.newaxis]
    objective = objectives.Clicks()
    (metric,) = objective.metrics()
    metric.update_state(labels[:, np.newaxis], logits)
    exact = click_metrics.auc(labels, objective.probabilities(logits))
    # Keras counts at 200 thresholds.
    assert float(metric.result()) == pytest.approx(exact, abs=2e-3)
    assert isinstance(metric, keras.metrics.AUC)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
