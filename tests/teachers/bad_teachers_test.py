"""Teachers that are useless, stale, broken or of another kind, in training."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tests.cases import tiers
from tfdistill.exports import saved_model

_X, _Y = cases.data()


@pytest.mark.parametrize(
    ("policy", "loss"),
    [tiers.deep("float32", "ForwardKL"), ("mixed_float16", "ReverseKL")],
)
def test_a_teacher_of_nan_gives_the_run_without_a_teacher(
    exchange, monkeypatch, policy, loss
):
    """To the bit: while it is asked, when it is dropped, and after."""
    keras.config.set_dtype_policy(policy)
    # The reader's gate is passed too.
    monkeypatch.setattr(saved_model, "check_finite", lambda *_: None)
    peer = cases.deep(1)
    for variable in peer.variables:
        variable.assign(tf.fill(variable.shape, float("nan")))
    cases.publish(exchange, peer)
    taught, plain = (
        cases.codistill(
            cases.deep(0),
            teachers,
            optimizer=keras.optimizers.Adam(0.01),
            distillation_loss=getattr(tfdistill.losses, loss)(temperature=2.0),
        )
        for teachers in (cases.peers(exchange), None)
    )
    cases.prepare(taught, _X, _Y)
    cases.load(taught, 10)
    logs = cases.fit(
        taught,
        _X,
        _Y,
        epochs=5,
        callbacks=[tfdistill.callbacks.TeacherLoader(every_steps=1)],
    )
    expected = cases.fit(plain, _X, _Y, epochs=5)
    assert logs["distillation_weight"] == [0] * 5
    assert logs["loss"] == expected["loss"] == logs["task_loss"]
    cases.assert_close(taught.student.variables, plain.student.variables)
    cases.assert_close(taught.optimizer.variables, plain.optimizer.variables)
    status = taught.teachers.status()[0]
    assert (status["health"], status["num_dropped"]) == ("dropped", 1)
    assert "3 refreshes in a row" in status["reason"]


def test_a_version_beyond_its_bound_has_no_weight_at_the_very_step(
    exchange, caplog
):
    num_traced = []

    def weight(step):
        if not tf.executing_eagerly():
            num_traced.append(step)
        return tf.constant(0.5)

    model = cases.codistill(
        cases.linear(0),
        cases.peers(exchange, max_staleness_steps=3),
        distillation_weight=weight,
    )
    data = tf.data.Dataset.from_tensor_slices((_X, _Y)).batch(16).repeat()
    steps = {"steps_per_epoch": 1}
    cases.prepare(model, data, **steps)
    # Rarer than the steps: the step itself sees the age.
    callbacks = [tfdistill.callbacks.TeacherLoader(every_steps=5)]
    cases.publish(exchange, cases.linear(1), step=0)
    cases.load(model, 0)
    with caplog.at_level(logging.WARNING):
        logs = cases.fit(model, data, epochs=6, callbacks=callbacks, **steps)
    assert logs["distillation_weight"] == [0.5] * 4 + [0] * 2
    expected = np.add(
        logs["task_loss"],
        np.multiply(logs["distillation_weight"], logs["distillation_loss"]),
    )
    np.testing.assert_allclose(logs["loss"], expected, rtol=1e-5)
    (status,) = model.teachers.status()
    found = [status[key] for key in ("health", "share", "age_steps")]
    assert found == ["too_stale", 0, 5]
    assert caplog.text.count("max_staleness_steps=3") == 1
    # The peer is back: at once all counts again, and nothing was retraced.
    cases.publish(exchange, cases.linear(2), step=6)
    cases.load(model, 6)
    logs = cases.fit(model, data, epochs=2, callbacks=callbacks, **steps)
    np.testing.assert_allclose(logs["distillation_weight"], [0.5, 0.5])
    assert model.teachers.status()[0]["health"] == "good"
    assert len(num_traced) == 1


@pytest.fixture(params=["validation_data", tiers.deep("canary")])
def taught(exchange, request):
    """A student that knows its canary batch, and learns nothing more."""
    student = cases.linear(0)
    student.layers[-1].set_weights(
        [9 * w for w in student.layers[-1].get_weights()]
    )
    batch = (_X, np.argmax(student(_X), axis=-1))
    given, of_fit = {"canary": tf.data.Dataset.from_tensors(batch)}, {}
    if request.param == "validation_data":
        given, of_fit = {}, {"validation_data": batch}
    model = cases.codistill(
        student,
        cases.peers(exchange, **given),
        optimizer=keras.optimizers.SGD(0.0),
    )
    cases.prepare(model, _X, _Y, **of_fit)
    return model


def test_a_version_worse_than_the_student_is_never_obeyed(
    exchange, taught, caplog
):
    """One that knows nothing, and passes for a uniform guess."""
    useless = cases.linear(1)
    useless.layers[-1].set_weights([np.zeros([4, 3]), np.zeros(3)])
    for step in (10, 11):
        cases.publish(exchange, useless, step=step)
        cases.refresh_until(
            taught, lambda s=step: s in cases.quarantined(taught)
        )
    (status,) = taught.teachers.status()
    assert (status["health"], status["share"]) == ("absent", 0)
    assert "worse than the student" in status["reason"]
    assert caplog.text.count("clearly worse than the student") == 1
    assert cases.fit(taught, _X, _Y)["distillation_weight"] == [0]
    # It improves.
    cases.publish(exchange, taught.student, step=12)
    cases.load(taught, 12)
    assert cases.fit(taught, _X, _Y)["distillation_weight"] == [1]
    # And is worse again: what was good stays in use.
    cases.publish(exchange, useless, step=13)
    cases.refresh_until(taught, lambda: 13 in cases.quarantined(taught))
    assert taught.teachers.status()[0]["step"] == 12


def _named(**outputs):
    """A student with outputs of some shapes, or of integers."""
    inputs = keras.Input((cases.NUM_FEATURES,))
    found = {}
    for name, kind in outputs.items():
        logits = keras.layers.Dense(kind[0] if kind != "int32" else 3)(inputs)
        found[name] = (
            keras.ops.cast(logits, kind)
            if isinstance(kind, str)
            else keras.layers.Reshape(kind)(logits)
        )
    return keras.Model(inputs, found)


def test_other_outputs_are_refused(exchange):
    """One class would be broadcast to ten without a word."""
    others = [
        cases.linear(1, classes=1),
        _named(logits="int32"),
        _named(logits=(10,), other=(3,)),
    ]
    for step, other in enumerate(others, 10):
        cases.publish(exchange, other, step=step)
    student = _named(logits=(10,))
    model = cases.codistill(
        student, cases.peers(exchange, allow_other_graphs=True)
    )
    cases.prepare(model, _X, {"logits": _Y})
    cases.refresh_until(model, lambda: len(cases.quarantined(model)) == 3)
    for step, theirs in ((10, "1]"), (11, "int32"), (12, "other")):
        own, found = cases.quarantined(model)[step].split("received", 1)
        assert "must match the student's" in own
        assert "10]" in own and theirs in found


class _Augmentation(keras.layers.Layer):
    def call(self, inputs, training=False):
        return inputs + 3.0 if training else inputs


def _augmented(seed):
    model = keras.Sequential(
        [
            keras.Input((cases.NUM_FEATURES,)),
            _Augmentation(),
            keras.layers.Dense(cases.NUM_CLASSES),
        ]
    )
    cases.randomize(model, seed)
    return model


def test_teachers_see_the_raw_batch_and_stay_as_they_are(exchange):
    student, peer = _augmented(0), _augmented(1)
    model = cases.codistill(
        student, cases.peers(exchange), optimizer=keras.optimizers.Adam(0.01)
    )
    data = tf.data.Dataset.from_tensor_slices((_X, _Y)).batch(16).repeat()
    steps = {"steps_per_epoch": 1}
    cases.prepare(model, data, **steps)
    cases.publish(exchange, peer)
    cases.load(model, 10)
    shapes = [tuple(v.shape) for v in student.trainable_variables]
    before = [v.numpy() for v in student.variables]
    own = cases.softmax(student(_X, training=True).numpy())
    logs = cases.fit(model, data, epochs=20, **steps)
    target = cases.softmax(peer(_X, training=False).numpy())
    expected = -(target * np.log(own)).sum(axis=-1).mean()
    found = logs["distillation_loss"][0]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    # The teacher is frozen, and no part of the student.
    cases.assert_close(cases.teacher_variables(model), peer.variables)
    pairs = zip(student.variables, before, strict=True)
    assert all((v.numpy() != old).any() for v, old in pairs)
    assert [tuple(v.shape) for v in model.trainable_variables] == shapes
    # Adam: the step, the rate and two slots a variable.
    assert len(model.optimizer.variables) == 2 + 2 * len(shapes)
