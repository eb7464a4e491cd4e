"""The student's own past as its teacher."""

import shutil

import keras
import numpy as np
import pytest

import tfdistill
from tests.cases import backup as backup_cases
from tests.cases import codistillation as cases

_X, _Y = cases.data(32)
_DECAY = 0.75
# Nobody else reads what is exported, and nothing is written.
_NOWHERE = tfdistill.Exchange(None)


def _student():
    """One with statistics that replicas keep apart."""
    inputs = keras.Input((cases.NUM_FEATURES,))
    hidden = keras.layers.BatchNormalization()(inputs)
    model = keras.Model(inputs, keras.layers.Dense(3)(hidden))
    cases.randomize(model, 0)
    return model


class _Values(keras.callbacks.Callback):
    """The student's values after each step, and the staleness in it."""

    def __init__(self):
        super().__init__()
        self.seen, self.staleness = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append([w.copy() for w in self.model.student.get_weights()])
        self.staleness.append(float(logs["teacher_staleness"]))


def _exporter(every_steps=2, **kwargs):
    return tfdistill.callbacks.StudentExporter(
        _NOWHERE, every_steps=every_steps, **kwargs
    )


def _trained(*callbacks, student=None, epochs=2, past=_DECAY):
    """Trains four steps an epoch."""
    model = cases.codistill(
        student or cases.deep(), tfdistill.teachers.OwnPast(past)
    )
    callbacks = list(callbacks)
    cases.fit(model, _X, _Y, batch_size=8, epochs=epochs, callbacks=callbacks)
    return model


def _held(model):
    return [v.numpy() for v in model.teachers.variables]


def _mean(versions):
    """The running mean, which begins with the first."""
    expected, *others = versions
    for seen in others:
        expected = [
            _DECAY * old + (1 - _DECAY) * new
            for old, new in zip(expected, seen, strict=True)
        ]
    return expected


def test_it_is_what_was_last_exported():
    values = _Values()
    model = _trained(values, _exporter(3), past=0.0)
    assert len(values.seen) == 8
    cases.assert_close(_held(model), values.seen[7], rtol=1e-5)
    # None before the first version; the last is that of the training's end.
    staleness = [np.nan] * 3 + [0, 1, 2, 0, 1]
    np.testing.assert_array_equal(values.staleness, staleness)
    (status,) = model.teachers.status()
    found = [status[key] for key in ("name", "step", "health", "swaps")]
    assert found == ["own_past", 8, "good", 3]
    assert len(model.weights) == len(model.student.weights)


@pytest.fixture(scope="module")
def trained():
    """Training with a mean of versions, and its values by step."""
    values = _Values()
    return _trained(values, _exporter()), values.seen


def test_a_mean_of_versions_needs_no_loader(trained):
    model, seen = trained
    cases.assert_close(_held(model), _mean(seen[1::2]), rtol=1e-5)
    # With both, it is the exporter that counts.
    both = _trained(
        _exporter(), tfdistill.callbacks.TeacherLoader(every_steps=1)
    )
    cases.assert_close(_held(both), _held(model), rtol=1e-5)


@pytest.mark.deep
def test_two_replicas_have_one_mean_and_a_refresh_needs_no_exporter(
    trained, two_replicas
):
    expected, _ = trained
    with two_replicas.scope():
        model = _trained(tfdistill.callbacks.TeacherLoader(every_steps=2))
    cases.assert_close(_held(model), _held(expected), rtol=1e-5)
    cases.assert_close(
        model.student.get_weights(), expected.student.get_weights(), rtol=1e-5
    )


@pytest.mark.deep
def test_statistics_of_replicas_are_averaged_first(two_replicas):
    with two_replicas.scope():
        model = _trained(
            tfdistill.callbacks.TeacherLoader(every_steps=2), student=_student()
        )
    for variable in model.teachers.variables:
        first, second = two_replicas.experimental_local_results(variable)
        np.testing.assert_array_equal(first, second)


def test_a_resumed_training_has_the_same_past(tmp_path, start_again):
    def run(*callbacks):
        backup = tfdistill.callbacks.Backup(
            tmp_path, every_steps=5, max_to_keep=9
        )
        patient = backup_cases.Patient(backup)
        model = _trained(
            _exporter(3), patient, backup, *callbacks, student=_student()
        )
        return model, backup.resumed_step

    whole, _ = run()
    # As if it had been killed before its end.
    shutil.rmtree(tmp_path / "group_0" / "8")
    start_again()
    values = _Values()
    resumed, resumed_step = run(values)
    # Step 5 is two after the version of step 3.
    assert resumed_step == 5 and values.staleness == [2, 0, 1]
    cases.assert_close(_held(resumed), _held(whole))
    cases.assert_close(resumed, whole)
