"""What docs/models.md says of `keras.distillation`, measured.

A test of a defect fails when Keras corrects it: then the page must change.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases

kd = pytest.importorskip("keras.distillation", reason="needs Keras >= 3.12")

_X, _Y = cases.data()
_T = 3.0


def _net(width, seed):
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(width, activation="tanh")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(3)(hidden))
    cases.randomize(model, seed)
    return model


def _task_loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _distilled(student, teacher, *, loss=None, y=_Y, epochs=3):
    """Steps of a Distiller; returns it and its logs."""
    logits = kd.LogitsDistillation(
        temperature=_T, loss=keras.losses.KLDivergence()
    )
    model = kd.Distiller(teacher, student, logits)
    model.compile(keras.optimizers.SGD(0.5), loss or _task_loss())
    history = model.fit(
        _X, y, batch_size=16, epochs=epochs, shuffle=False, verbose=0
    )
    return model, history.history


def _difference(one, other):
    pairs = zip(one.get_weights(), other.get_weights(), strict=True)
    return max(np.abs(a - b).max() for a, b in pairs)


def test_the_same_training_is_equal():
    teacher = _net(7, 3)
    before, _ = _distilled(_net(5, 1), teacher)
    model = tfdistill.CodistillModel(
        _net(5, 1), teachers=tfdistill.teachers.FixedTeacher(teacher)
    )
    model.compile(
        keras.optimizers.SGD(0.5),
        _task_loss(),
        loss_weights=0.5,
        distillation_weight=0.5,
        distillation_loss=tfdistill.losses.ForwardKL(temperature=_T),
    )
    cases.fit(model, _X, _Y, batch_size=16, epochs=3)
    assert _difference(model.student, before.student) < 1e-6
    assert _difference(model.student, _net(5, 1)) > 1e-3


@pytest.mark.deep
def test_kl_by_name_takes_no_softmax():
    teacher, student = 4 * _X[:, :3], 4 * _X[:, 1:]
    soft = [cases.softmax(z / _T) for z in (teacher, student)]
    wanted = _T**2 * np.mean((soft[0] * np.log(soft[0] / soft[1])).sum(-1))
    by_default = kd.LogitsDistillation(temperature=_T)
    assert abs(by_default.compute_loss(teacher, student) - wanted) > 0.5
    negative = [-np.abs(z) - 1 for z in (teacher, student)]
    assert float(by_default.compute_loss(*negative)) == 0


@pytest.mark.deep
def test_two_replicas_take_another_step(two_replicas):
    one_hot = np.eye(3, dtype="float32")[_Y]
    moved, logged = [], []
    for strategy in (tf.distribute.get_strategy(), two_replicas):
        with strategy.scope():
            student = _net(5, 1)
            start = student.get_weights()
            _, logs = _distilled(
                student, _net(7, 3), loss="mse", y=one_hot, epochs=1
            )
        pairs = zip(student.get_weights(), start, strict=True)
        moved.append(np.concatenate([(a - b).ravel() for a, b in pairs]))
        logged.append(logs["distillation_loss"][0])
    assert np.linalg.norm(moved[1]) > 1.3 * np.linalg.norm(moved[0])
    assert logged[1] == pytest.approx(logged[0] / 2, rel=1e-4)
