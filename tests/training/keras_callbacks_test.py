"""Callbacks that Keras ships do their work on `CodistillModel.fit`.

On one device, with a teacher; tests/runs/callbacks_test.py has those that log.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import tfdistill
from tests.cases import codistillation as cases
from tests.cases import tiers

_X, _Y = cases.data()


class Bench:
    """One model with a teacher, traced once for all checks."""

    def __init__(self, directory: Any) -> None:
        self.directory = directory
        self.exchange = tfdistill.Exchange(directory / "exchange")
        cases.publish(self.exchange, cases.linear(1))
        self.model = cases.codistill(
            cases.linear(0), cases.peers(self.exchange), metrics=["accuracy"]
        )
        cases.prepare(self.model, *_data())
        cases.load(self.model, 10)
        self._weights = self.model.get_weights()

    def begin(self, directory: Any) -> None:
        """Forgets all that was trained."""
        self.directory = directory
        self.model.set_weights(self._weights)
        self.model.optimizer.learning_rate = 0.1
        self.model.optimizer.iterations.assign(0)

    def fit(self, *callbacks: Any, epochs: int = 3, **kwargs: Any) -> dict:
        return cases.fit(
            self.model,
            *_data(),
            epochs=epochs,
            callbacks=[cases.never(), *callbacks],
            **kwargs,
        )

    def loss_of(self, weights: Any) -> float:
        """The task's loss of a plain student with these weights."""
        student = cases.linear(5)
        student.set_weights(weights)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return float(loss(_Y, student(_X)))


def _data() -> tuple:
    return (_X, _Y)


@pytest.fixture(scope="module")
def one_bench(tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("bench"))


@pytest.fixture
def bench(one_bench, tmp_path):
    one_bench.begin(tmp_path)
    return one_bench


def _backup_and_restore(bench: Bench) -> None:
    def backup() -> Any:
        return keras.callbacks.BackupAndRestore(str(bench.directory / "backup"))

    def stop(epoch: int, logs: Any) -> None:
        if epoch == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        bench.fit(backup(), keras.callbacks.LambdaCallback(on_epoch_begin=stop))
    before = bench.model.get_weights()
    bench.begin(bench.directory)
    found = {}

    def note(epoch: int, logs: Any) -> None:
        found.setdefault(epoch, bench.model.get_weights())

    bench.fit(backup(), keras.callbacks.LambdaCallback(on_epoch_begin=note))
    assert list(found) == [2]
    for restored, value in zip(found[2], before, strict=True):
        np.testing.assert_array_equal(restored, value)


def _early_stopping(bench: Bench) -> None:
    logs = bench.fit(
        keras.callbacks.EarlyStopping(
            "val_loss", mode="max", patience=1, restore_best_weights=True
        ),
        epochs=9,
        validation_data=_data(),
    )
    # The loss falls, which is worse here: the first epoch was the best.
    assert len(logs["loss"]) == 2
    best = bench.loss_of(bench.model.get_weights())
    assert best == pytest.approx(logs["val_loss"][0], rel=1e-4)


def _model_checkpoint(bench: Bench) -> None:
    whole = bench.directory / "last.keras"
    best = bench.directory / "best.keras"
    weights = bench.directory / "{epoch}.weights.h5"
    checkpoint = keras.callbacks.ModelCheckpoint
    logs = bench.fit(
        checkpoint(whole),
        checkpoint(best, monitor="val_loss", mode="max", save_best_only=True),
        checkpoint(weights, save_weights_only=True),
        validation_data=_data(),
    )
    loaded = keras.models.load_model(whole)
    assert type(loaded) is keras.Sequential
    np.testing.assert_allclose(loaded(_X), bench.model.student(_X), rtol=1e-6)
    found = keras.models.load_model(best).get_weights()
    assert bench.loss_of(found) == pytest.approx(
        max(logs["val_loss"]), rel=1e-4
    )
    for epoch, expected in enumerate(logs["val_loss"], 1):
        student = cases.linear(7)
        student.load_weights(str(weights).format(epoch=epoch))
        loss = bench.loss_of(student.get_weights())
        assert loss == pytest.approx(expected, rel=1e-4)


def _swap_ema_weights(bench: Bench) -> None:
    optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
    model = cases.codistill(cases.linear(0), optimizer=optimizer)
    seen: list = []
    note = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: seen.append(model.get_weights()),
        on_epoch_end=lambda epoch, logs: seen.append(model.get_weights()),
    )
    logs = cases.fit(
        model,
        *_data(),
        batch_size=4,
        validation_data=_data(),
        callbacks=[keras.callbacks.SwapEMAWeights(), note],
    )
    before, trained = map(bench.loss_of, seen)
    # Validated was the average over the steps; trained was gone on with.
    assert trained < logs["val_loss"][0] < before


def _terminate_on_nan(bench: Bench) -> None:
    batches: list = []
    x = _X.copy()
    x[4:8] = np.nan
    cases.fit(
        bench.model,
        x,
        _Y,
        epochs=3,
        batch_size=4,
        callbacks=[
            cases.never(),
            keras.callbacks.TerminateOnNaN(),
            keras.callbacks.LambdaCallback(
                on_train_batch_begin=lambda batch, logs: batches.append(batch)
            ),
        ],
    )
    assert batches == [0, 1]


_CHECKS: dict[str, Callable[[Bench], None]] = {
    "EarlyStopping": _early_stopping,
    "ModelCheckpoint": _model_checkpoint,
    "SwapEMAWeights": _swap_ema_weights,
    "TerminateOnNaN": _terminate_on_nan,
    # The last: Keras leaves a mark on a model that it has restored.
    "BackupAndRestore": _backup_and_restore,
}
# What reads or changes weights; the others are deep.
_EVERY_RUN = {"EarlyStopping", "ModelCheckpoint", "SwapEMAWeights"}


@pytest.mark.parametrize("name", tiers.but_for(_EVERY_RUN, _CHECKS))
def test_it_does_its_work(bench, name):
    _CHECKS[name](bench)
