"""Sums of metric states, against Keras' own metrics on all of the data."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import servers as cases
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


def _model(wrap):
    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(1, "sigmoid", name="top")]
    )
    model.get_layer("top").set_weights([np.array([[0.5], [-2.0]]), np.ones(1)])
    model = wrap(model)
    model.compile(
        keras.optimizers.SGD(0.0),
        "binary_crossentropy",
        metrics=["accuracy", keras.metrics.AUC(name="auc"), _Biased()],
        weighted_metrics=[
            keras.metrics.MeanSquaredError(name="weighted_mse"),
            keras.metrics.F1Score(threshold=0.5),
            _Several(name="several"),
        ],
    )
    return model


def test_executions_add_up_to_what_keras_finds(monkeypatch):
    rng = np.random.default_rng(0)
    data = (
        rng.normal(size=[16, 2]).astype("float32"),
        rng.integers(0, 2, [16, 1]).astype("float32"),
        rng.uniform(0.2, 3.0, 16).astype("float32"),
    )
    data = tf.data.Dataset.from_tensor_slices(data)
    evaluate = {"return_dict": True, "verbose": 0}
    plain = _model(lambda model: model)
    expected = plain.evaluate(data.batch(16), **evaluate)
    cases.pretend(monkeypatch, 2)
    model = _model(tfdistill.DistributedModel)
    for _ in range(2):  # The second begins where the first did.
        found = model.evaluate(data.batch(5), **evaluate)
        assert {"loss", "accuracy", "auc", "weighted_mse"} < found.keys()
        assert "twice_the_mean" in found and "several" not in found
        assert found["biased"] == _Biased.START + 16
        assert found.keys() == expected.keys() > {"both", "one", "f1_score"}
        for name, value in expected.items():
            assert type(found[name]) is type(value), name
            np.testing.assert_allclose(
                found[name], value, rtol=1e-5, err_msg=name
            )
    # At the end of an epoch metrics themselves have what the sums stand for.
    seen = []
    look = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: seen.append(model.get_metrics_result())
    )
    model.fit(data.batch(5), epochs=2, callbacks=[look], verbose=0)
    for results in seen:
        for name in ("auc", "weighted_mse", "biased"):
            found = float(results[name])
            assert found == pytest.approx(expected[name], rel=1e-5)


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
