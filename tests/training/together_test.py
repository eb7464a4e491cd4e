"""What a callback decides on its own, and whether its code shows it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tfdistill.training import together


def _stop(model):
    model.stop_training = True


class _Stops(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = batch > 3


class _Asks(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        def now():
            _stop(self.model)

        if batch > 3:
            now()


class _StopsByAName(_Asks):
    def on_train_batch_end(self, batch, logs=None):
        setattr(self.model, "stop" + "_training", True)

    def _end(self):
        setattr(self.model, "stop_training", True)  # noqa: B010


class _StopsAtTheEnd(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = True

    def on_train_batch_end(self, batch, logs=None):
        print(logs)


class _Early(keras.callbacks.EarlyStopping):
    def on_train_batch_end(self, batch, logs=None):
        print(logs)


def _lambda():
    model = keras.Sequential()
    return keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: _stop(model)
    )


@pytest.mark.parametrize(
    ("callback", "expected"),
    [
        (_Stops, True),
        (_Asks, True),
        (_StopsByAName, True),
        (_lambda, True),
        (_StopsAtTheEnd, False),
        (_Early, False),
        (keras.callbacks.EarlyStopping, False),
        (keras.callbacks.TerminateOnNaN, False),
        (lambda: tfdistill.callbacks.TeacherLoader(every_steps=1), False),
    ],
)
def test_who_may_stop_within_an_epoch(callback, expected):
    assert together.may_stop(callback()) is expected


class _Budget:
    """Decides for a callback whose code does not show it."""

    def look(self, batch, model):
        model.stop_training = batch > 0


class _Asked(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.budget = _Budget()

    def on_train_batch_end(self, batch, logs=None):
        self.budget.look(batch, self.model)


@pytest.mark.parametrize("is_nan", [False, True])
def test_who_stops_unexpectedly_does_so_at_the_end_of_an_epoch(is_nan):
    """Others would wait for it in a step, unless they see the same loss."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    asked = keras.callbacks.TerminateOnNaN() if is_nan else _Asked()
    assert not together.may_stop(asked)
    agreed = together.Together(tf.distribute.get_strategy(), [asked])
    x = np.full([10, 2], np.nan if is_nan else 1.0)
    fit = {"batch_size": 2, "epochs": 3, "verbose": 0}
    history = model.fit(x, x[:, :1], callbacks=[asked, agreed], **fit)
    assert history.epoch == [0]
    assert int(model.optimizer.iterations) == (1 if is_nan else 5)
