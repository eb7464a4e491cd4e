"""Tests of copies for tuners, and of a search that makes them."""

import copy
import os
import pathlib

import keras
import pytest

import tfdistill
from tests.cases import training as training_cases


def test_copies_have_the_same_arguments_and_share_nothing(tmp_path):
    exchange = tfdistill.Exchange(tmp_path, max_to_keep=5)
    exporter = tfdistill.StudentExporter(exchange, every_steps=3, group=1)
    first, second = copy.deepcopy(exporter), copy.deepcopy(exporter)
    assert first is not exporter and first is not second
    assert first._exchange is not exchange
    assert first._exchange.group_path(0) == exchange.group_path(0)
    assert first._exchange.incarnation != exchange.incarnation
    assert first._exchange._retention._max_to_keep == 5
    assert first._schedule.every_steps == 3
    assert first._given_group == 1
    for callback in (
        tfdistill.TeacherLoader(every_steps=2),
        tfdistill.Backup(tmp_path / "backup", every_steps=2),
    ):
        found = copy.deepcopy(callback)
        assert type(found) is type(callback) and found is not callback
        assert found._schedule is not callback._schedule
        assert found._schedule.every_steps == 2


class _Copier(keras.callbacks.Callback):
    """Tries to copy what is in use."""

    def __init__(self, originals) -> None:
        super().__init__()
        self._originals = originals
        self.errors = []

    def on_epoch_end(self, epoch, logs=None):
        for original in self._originals:
            with pytest.raises(ValueError, match="must not be copied") as info:
                copy.deepcopy(original)
            self.errors.append(str(info.value))


def _model(rate=0.1, teachers=None):
    model = tfdistill.CodistillModel(
        training_cases.dense(keras.Model), teachers=teachers
    )
    psi = tfdistill.losses.LogitsMeanSquaredError(from_logits=True)
    model.compile(
        keras.optimizers.SGD(rate),
        "mse",
        distillation_loss=psi if teachers else None,
    )
    return model


def test_what_a_training_uses_is_not_copied(tmp_path):
    exchange = tfdistill.Exchange(tmp_path / "exchange")
    exporter = tfdistill.StudentExporter(exchange, every_steps=3)
    backup = tfdistill.Backup(tmp_path / "backup")
    copier = _Copier([exchange, exporter, backup])
    x, y = training_cases.regression(16)
    callbacks = [exporter, backup, copier]
    _model().fit(x, y, batch_size=8, verbose=0, callbacks=callbacks)
    names = [error.split()[0] for error in copier.errors]
    assert names == [
        "tfdistill.Exchange",
        "tfdistill.StudentExporter",
        "tfdistill.Backup",
    ]
    found = copy.deepcopy(exporter)  # The training has ended.
    assert exporter.num_published and not found.num_published


# KerasTuner asks for its thread by methods of old.
@pytest.mark.filterwarnings(
    "ignore:(currentThread|getName).*deprecated:DeprecationWarning:keras_tuner"
)
# It looks for the best of each log: without peers the staleness is NaN.
@pytest.mark.filterwarnings("ignore:All-NaN axis encountered:RuntimeWarning")
def test_a_search_trains_each_trial_with_its_own_exchange(tmp_path):
    keras_tuner = pytest.importorskip("keras_tuner")
    x, y = training_cases.regression(16)
    _model().export(tmp_path / "teacher", verbose=False)

    class Search(keras_tuner.RandomSearch):
        def run_trial(self, trial, *args, callbacks=(), **kwargs):
            directory = self.get_trial_dir(trial.trial_id)
            exchange = tfdistill.Exchange(os.path.join(directory, "exchange"))
            exporter = tfdistill.StudentExporter(exchange, every_steps=2)
            callbacks = [*callbacks, exporter]
            return super().run_trial(
                trial, *args, callbacks=callbacks, **kwargs
            )

    def build(hp):
        path = tmp_path / "teacher"
        teachers = tfdistill.TeacherSet(saved_models=[path])
        return _model(hp.Float("rate", 0.001, 0.1), teachers)

    search = Search(
        build,
        objective="val_loss",
        max_trials=4,
        directory=tmp_path,
        project_name="search",
    )
    search.search(
        x,
        y,
        batch_size=8,
        epochs=2,
        verbose=0,
        validation_data=(x, y),
        callbacks=[
            tfdistill.TeacherLoader(every_steps=2),
            keras.callbacks.EarlyStopping(patience=3),
        ],
    )
    trials = sorted(pathlib.Path(tmp_path, "search").glob("trial_*"))
    assert len(trials) == 4
    for trial in trials:
        exchange = tfdistill.Exchange(trial / "exchange")
        assert exchange.steps(0)[-1] == 4
    (best,) = search.get_best_hyperparameters()
    assert 0.001 <= best.get("rate") <= 0.1
