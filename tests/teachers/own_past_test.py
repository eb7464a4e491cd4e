"""The student's own running mean as its teacher."""

import keras
import numpy as np
import pytest

import tfdistill
from tests.cases import codistillation as cases

_X, _Y = cases.data(32)
_DECAY = 0.75


def _student():
    """One with statistics that replicas keep apart."""
    inputs = keras.Input((cases.NUM_FEATURES,))
    hidden = keras.layers.BatchNormalization()(inputs)
    model = keras.Model(inputs, keras.layers.Dense(3)(hidden))
    cases.randomize(model, 0)
    return model


class _Values(keras.callbacks.Callback):
    """The student's values after each step."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append([w.copy() for w in self.model.student.get_weights()])


def _trained(*callbacks, student=None, epochs=2, every_steps=2):
    model = cases.codistill(
        student or cases.linear(), tfdistill.TeacherSet(own_past=_DECAY)
    )
    model.fit(
        _X,
        _Y,
        batch_size=8,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[
            *callbacks,
            tfdistill.TeacherLoader(every_steps=every_steps),
        ],
    )
    return model


def _mean(model):
    return [v.numpy() for v in model.teachers.own_past.mean]


def test_it_is_the_running_mean_of_the_students_values():
    values, student = _Values(), cases.linear()
    expected = [w.copy() for w in student.get_weights()]
    model = _trained(values, student=student)
    for seen in values.seen[1::2]:
        expected = [
            _DECAY * old + (1 - _DECAY) * new
            for old, new in zip(expected, seen, strict=True)
        ]
    for found, wanted in zip(_mean(model), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
    (status,) = model.teachers.status()
    assert (status["name"], status["health"]) == ("own_past", "good")


def test_two_replicas_have_one_mean(two_replicas):
    expected = _trained(student=cases.deep())
    with two_replicas.scope():
        model = _trained(student=cases.deep())
    for found, wanted in zip(_mean(model), _mean(expected), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
    for found, wanted in zip(
        model.student.get_weights(),
        expected.student.get_weights(),
        strict=True,
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_statistics_of_replicas_are_averaged_first(two_replicas):
    with two_replicas.scope():
        model = _trained(student=_student())
    for variable in model.teachers.own_past.mean:
        first, second = two_replicas.experimental_local_results(variable)
        np.testing.assert_array_equal(first, second)


def test_a_resumed_training_has_the_same_mean(tmp_path):
    whole = _trained(epochs=4, every_steps=3)
    _trained(tfdistill.Backup(tmp_path, every_steps=8), every_steps=3)
    backup = tfdistill.Backup(tmp_path, every_steps=8)
    resumed = _trained(backup, epochs=4, every_steps=3)
    assert backup.resumed_step == 8
    for found, wanted in zip(_mean(resumed), _mean(whole), strict=True):
        np.testing.assert_array_equal(found, wanted)
    for found, wanted in zip(
        resumed.get_weights(), whole.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)


def test_no_file_knows_of_it_and_nonsense_is_refused(tmp_path):
    model = _trained()
    assert len(model.weights) == len(model.student.weights)
    with pytest.warns(UserWarning, match="TeacherLoader"):
        model = cases.codistill(
            cases.linear(), tfdistill.TeacherSet(own_past=0.5)
        )
        model.fit(_X, _Y, verbose=0)
    for wrong in (1, -0.1, True, "0.9"):
        with pytest.raises(ValueError, match="own_past.*Such as 0.9"):
            tfdistill.TeacherSet(own_past=wrong)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
