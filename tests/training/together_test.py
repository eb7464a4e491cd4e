""""""

import keras
import pytest

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
