"""Callbacks that Keras ships do their work on `CodistillModel.fit`.

On one device; tests/runs/callbacks_test.py has most of them, on two workers.
"""

import keras
import numpy as np
import pytest

import tfdistill
from tests.cases import codistillation as cases

_X, _Y = cases.data()


def _loss_of(weights):
    """The task's loss of a plain student with these weights."""
    student = cases.linear(5)
    student.set_weights(weights)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return float(loss(_Y, student(_X)))


@pytest.mark.deep
def test_backup_and_restore(tmp_path):
    teacher = tfdistill.teachers.FixedTeacher(cases.linear(1))
    model, begun = cases.codistill(cases.linear(0), teacher), {}

    def fit(on_epoch_begin):
        backup = keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))
        note = keras.callbacks.LambdaCallback(on_epoch_begin=on_epoch_begin)
        cases.fit(model, _X, _Y, epochs=3, callbacks=[backup, note])

    def stop(epoch, logs):
        if epoch == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        fit(stop)
    before = model.get_weights()
    cases.randomize(model.student, 7)
    fit(lambda epoch, logs: begun.setdefault(epoch, model.get_weights()))
    assert list(begun) == [2]
    for restored, value in zip(begun[2], before, strict=True):
        np.testing.assert_array_equal(restored, value)


def test_averages_are_validated_and_training_continues_from_the_weights():
    optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
    model = cases.codistill(cases.linear(0), optimizer=optimizer)
    seen = []
    note = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: seen.append(model.get_weights()),
        on_epoch_end=lambda epoch, logs: seen.append(model.get_weights()),
    )
    logs = cases.fit(
        model,
        _X,
        _Y,
        batch_size=4,
        validation_data=(_X, _Y),
        callbacks=[keras.callbacks.SwapEMAWeights(), note],
    )
    before, trained = map(_loss_of, seen)
    # The average over the steps lies between.
    assert trained < logs["val_loss"][0] < before


def test_terminate_on_nan_stops_without_an_error():
    batches, x = [], _X.copy()
    x[4:8] = np.nan
    note = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: batches.append(batch)
    )
    callbacks = [keras.callbacks.TerminateOnNaN(), note]
    model = cases.codistill(cases.linear(0))
    cases.fit(model, x, _Y, epochs=3, batch_size=4, callbacks=callbacks)
    assert batches == [0, 1]
