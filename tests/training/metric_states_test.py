"""Metrics between steps: on two replicas as Keras has them on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import tiers
from tests.cases import training as cases
from tfdistill.training import steps


class _AlsoTold(cases.Counted):
    """Knows a number that all replicas have, and how often it was reset."""

    def __init__(self):
        super().__init__()
        self.told = self.add_variable((), "zeros", aggregation="mean")
        self.resets = 0

    def reset_state(self):
        super().reset_state()
        self.told.assign(0.5)
        self.resets += 1

    def result(self):
        return {"count": self.count, "told": self.told, "resets": self.resets}


class _AtEpochs(keras.callbacks.Callback):
    """What a callback reads, where an epoch begins and where it ends."""

    def on_train_begin(self, logs=None):
        self.read = []

    def on_epoch_begin(self, epoch, logs=None):
        self._read()

    def on_epoch_end(self, epoch, logs=None):
        self._read()

    def _read(self):
        in_scope = self.model.distribute_strategy.extended
        for metric in self.model.metrics:
            for variable in metric.variables:
                assert in_scope.variable_created_in_scope(variable.value)
        found = steps.flat(self.model.get_metrics_result())
        self.read.append({key: float(value) for key, value in found.items()})


def _read(strategy, *, above=False):
    keras.utils.set_random_seed(0)
    metric = _AlsoTold() if above else None
    with strategy.scope():
        model = tfdistill.DistributedModel(
            keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        )
        model.compile("sgd", "mse", metrics=["mae", metric or _AlsoTold()])
    x = np.random.default_rng(0).normal(size=(12, 2)).astype(np.float32)
    at_epochs = _AtEpochs()
    model.fit(
        x,
        x[:, :1],
        batch_size=4,
        epochs=2,
        verbose=0,
        shuffle=False,
        validation_data=(x[:6], x[:6, :1]),
        callbacks=[at_epochs],
    )
    return at_epochs.read


@pytest.mark.parametrize("above", [True, tiers.deep(False)])
def test_callbacks_read_what_one_device_has(two_replicas, above):
    """Also of a metric that was made above the scope."""
    expected = _read(tf.distribute.get_strategy())
    actual = _read(two_replicas, above=above)
    assert [read["count"] for read in expected] == [4, 10, 4, 10]
    for one, other in zip(actual, expected, strict=True):
        assert one.keys() == other.keys()
        for key, value in other.items():
            np.testing.assert_allclose(one[key], value, rtol=1e-5, err_msg=key)


class _Last(cases.Counted):
    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign(keras.ops.shape(y_true)[0])


def test_a_metric_that_keeps_the_last_value_is_named(two_replicas):
    with two_replicas.scope():
        model = tfdistill.DistributedModel(
            keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        )
        model.compile(loss="mse", metrics=[_Last(name="rows")])
    said = "replicas .* another kind, of its variable 'rows/variable.* added up"
    with pytest.warns(UserWarning, match=said):
        model.evaluate(np.ones([8, 2]), np.ones([8, 1]), verbose=0)
