"""Tests of the generated clicks: what their docstring promises."""

import numpy as np

from models import click_log
from models import clicks
from tfdistill import metrics


def _log_loss(log, probabilities):
    return metrics.quality(log.labels, probabilities)["log_loss"]


def test_the_same_seed_makes_the_same_log():
    one, same, other = (
        click_log.generate(seed, rows_per_day=50) for seed in (3, 3, 4)
    )
    for name in ("ids", "numbers"):
        np.testing.assert_array_equal(one.inputs[name], same.inputs[name])
        assert not np.array_equal(one.inputs[name], other.inputs[name])
    np.testing.assert_array_equal(one.labels, same.labels)


def test_labels_are_drawn_with_the_true_probabilities():
    log = click_log.generate(seed=1)
    for bound in (0.1, 0.3):
        rows = np.abs(log.probabilities - bound) < 0.02
        assert abs(log.labels[rows].mean() - bound) < 0.03
    truth = _log_loss(log, log.probabilities)
    mean = np.full(len(log.labels), log.labels.mean())
    assert truth < 0.9 * _log_loss(log, mean)
    # Anybody who knows better than the truth has seen the labels.
    for worse in (log.probabilities * 0.9, log.probabilities**0.9):
        assert _log_loss(log, worse) > truth


def test_sales_follow_clicks_with_the_true_probabilities():
    log = click_log.generate(seed=1)
    assert not log.sales[log.labels == 0].any()
    assert 0.2 < log.sales.mean() / log.labels.mean() < 0.3
    assert (log.sale_probabilities < log.probabilities).all()
    for bound in (0.03, 0.1):
        rows = np.abs(log.sale_probabilities / bound - 1) < 0.2
        error = (bound / rows.sum()) ** 0.5
        mean = log.sale_probabilities[rows].mean()
        assert abs(log.sales[rows].mean() - mean) < 4 * error


def test_the_student_of_two_tasks_has_a_head_for_each():
    workload = clicks.two_tasks(rows_per_day=20)
    (inputs, labels), _ = workload.data
    logits = workload.model()(inputs)
    assert workload.auxiliary_heads == {
        "click_soft": "click",
        "sale_soft": "sale",
    }
    assert logits.keys() == {*labels, *workload.auxiliary_heads}
    assert all(value.shape == (140, 1) for value in logits.values())
    plain = clicks.two_tasks(
        rows_per_day=20, learned_weights=False, auxiliary_heads=False
    )
    assert plain.model()(inputs).keys() == labels.keys()


def test_the_last_day_is_held_out_and_the_clicks_drift():
    log = click_log.generate(rows_per_day=2000)
    train, held_out = click_log.split(log)
    assert set(train.days) == set(range(7)) and set(held_out.days) == {7}
    assert len(held_out.labels) == 2000
    still = click_log.generate(rows_per_day=2000, drift=0.0)
    frequent = np.unique(still.inputs["ids"][:, 0], return_counts=True)[1]
    assert (frequent > 100).any()

    def changes(log):
        days = [log.probabilities[log.days == day].mean() for day in range(8)]
        return np.std(days)

    assert changes(log) > 2 * changes(still)
