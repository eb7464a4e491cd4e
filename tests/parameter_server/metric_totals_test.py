"""Sums of metric states, against Keras' own metrics on all of the data."""

import keras
import numpy as np
import pytest

from tfdistill.parameter_server import metric_totals


class _Biased(keras.metrics.Metric):
    """Counts examples, and starts elsewhere than at zero."""

    START = 100.0

    def __init__(self, name="biased"):
        super().__init__(name=name)
        self.count = self.add_variable([], "zeros", name="count")
        self.reset_state()

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(
            keras.ops.cast(keras.ops.shape(y_true)[0], "float32")
        )

    def result(self):
        return self.count

    def reset_state(self):
        self.count.assign(self.START)


class _Several(keras.metrics.Mean):
    """Gives results by name, an array too, which Keras puts among the others.

    However deep they are.
    """

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(y_pred)

    def result(self):
        mean = super().result()
        both = keras.ops.stack([mean, 2 * mean])
        deep = {"both": both, "one": both[:1]}
        return {"mean_of_outputs": mean, "twice_the_mean": 2 * mean, "in": deep}


def _model():
    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(1, activation="sigmoid")]
    )
    model.compile(
        "sgd",
        "binary_crossentropy",
        metrics=["accuracy", keras.metrics.AUC(num_thresholds=20), _Biased()],
        weighted_metrics=[
            keras.metrics.MeanSquaredError(name="weighted_mse"),
            keras.metrics.F1Score(threshold=0.5),
            _Several(name="several"),
        ],
    )
    return model


def _batches():
    rng = np.random.default_rng(0)
    for num_rows in (5, 8, 3):
        yield (
            rng.normal(size=[num_rows, 2]).astype("float32"),
            rng.integers(0, 2, [num_rows, 1]).astype("float32"),
            rng.uniform(0.2, 3.0, num_rows).astype("float32"),
        )


@pytest.fixture
def model():
    made = _model()
    x, y, weight = next(_batches())
    # Builds the metrics, and leaves something in them.
    made.evaluate(x, y, sample_weight=weight, verbose=0)
    return made


def _states(model, totals, batches):
    """What one execution makes of the initial states."""
    states = totals.initial()
    for x, y, weight in batches:
        mapping = list(zip(totals.variables, states, strict=True))
        with keras.StatelessScope(mapping) as scope:
            y_pred = model(x, training=False)
            loss = model.compute_loss(x, y, y_pred, weight)
            model._loss_tracker.update_state(loss, sample_weight=len(x))
            model.compute_metrics(x, y, y_pred, weight)
        states = [scope.get_current_value(v) for v in totals.variables]
    return states


def _expected(model):
    x, y, weight = (np.concatenate(c) for c in zip(*_batches(), strict=True))
    return model.evaluate(
        x,
        y,
        batch_size=len(x),
        sample_weight=weight,
        return_dict=True,
        verbose=0,
    )


def test_executions_add_up_to_what_keras_finds(model):
    totals = metric_totals.MetricTotals(model)
    first, second, third = _batches()
    for execution in ([first, second], [third]):
        totals.add(totals.added(_states(model, totals, execution)).numpy())
    found, expected = totals.results(), _expected(model)
    assert {"loss", "accuracy", "auc", "weighted_mse"} < found.keys()
    assert "twice_the_mean" in found and "several" not in found
    assert found["biased"] == _Biased.START + 16
    assert found.keys() == expected.keys() > {"both", "one", "f1_score"}
    for name, value in expected.items():
        assert type(found[name]) is type(value), name
        np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)


def test_assign_gives_the_metrics_what_the_sums_stand_for(model):
    totals = metric_totals.MetricTotals(model)
    for batch in _batches():
        totals.add(totals.added(_states(model, totals, [batch])).numpy())
    totals.assign()
    found, expected = model.get_metrics_result(), totals.results()
    for name in ("loss", "auc", "weighted_mse"):
        assert float(found[name]) == pytest.approx(expected[name])
    assert float(found["biased"]) == _Biased.START + 16
    totals.reset()
    assert not totals.sums.any()
    totals.assign()
    assert float(model.get_metrics_result()["biased"]) == _Biased.START


def test_sums_are_exact_beyond_float32():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[_Biased()])
    model.evaluate(np.ones([1, 2]), np.ones([1, 1]), verbose=0)
    totals = metric_totals.MetricTotals(model)
    big = np.zeros(totals.size)
    big[-1] = 2.0**25
    totals.add(big)
    for _ in range(6):
        totals.add(big * 2.0**-25)
    assert totals.sums[-1] == 2.0**25 + 6
    kept = totals.sums
    totals.add(big)
    assert kept[-1] == 2.0**25 + 6
