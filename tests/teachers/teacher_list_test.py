"""The teachers of one student, followed, refreshed and dropped."""

import dataclasses
import logging
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tests.cases import tiers
from tfdistill import teachers as kinds
from tfdistill.exports import saved_model
from tfdistill.follow import agreement
from tfdistill.teachers import staleness

_X, _Y = cases.data()


# No row of it is near 0.
_FAR = abs(_X) + 2


def _outputs(model, x=_X):
    return cases.outputs_of_teachers(model, x)


def _settle(model):
    """Waits until the first teacher's version is taken or refused."""
    cases.refresh_until(
        model,
        lambda: (
            cases.quarantined(model) or model.teachers.status()[0]["step"] >= 0
        ),
    )


def _versions(model):
    return {s["name"]: s["step"] for s in model.teachers.status()}


def _state(*steps):
    silence = dataclasses.astuple(staleness.Silence())
    return {
        f"group_{group}": {"step": step, "now": None, "silence": silence}
        for group, step in enumerate(steps, 1)
    }


def test_a_version_that_cannot_be_read_is_left_out(exchange, caplog):
    for group in (1, 2, 3):
        cases.publish(exchange, cases.linear(group), group=group, step=7)
    shutil.rmtree(exchange.version_path(1, 7))
    with open(f"{exchange.version_path(2, 7)}/saved_model.pb", "r+b") as file:
        file.write(b"x")
    model = cases.following(exchange, peers=(1, 2, 3))
    with caplog.at_level(logging.WARNING):
        model.teachers.restore(_state(7, 7, 7, 10))
    assert _versions(model) == {"group_1": -1, "group_2": -1, "group_3": 7}
    assert "ersion 7 of group 1" in caplog.text
    assert "ersion 7 of group 2" in caplog.text
    assert "group_4 are no longer teachers" in caplog.text
    cases.publish(exchange, cases.linear(3), group=1, step=8)
    cases.load(model, 8, -1, 7)


def test_another_graph_comes_back_too(exchange):
    cases.publish(exchange, cases.deep(1), step=7)
    model = cases.following(exchange, allow_other_graphs=True)
    model.teachers.restore(_state(7))
    np.testing.assert_allclose(
        _outputs(model)[0][0], cases.deep(1)(_X), rtol=1e-5
    )
    assert model.teachers.generation == 1


# ---- following peers ----


# ---- peers with other graphs ----


def test_another_graph_is_loaded_once(exchange, monkeypatch):
    loads = []
    load = tf.saved_model.load
    monkeypatch.setattr(
        tf.saved_model, "load", lambda p: loads.append(p) or load(p)
    )
    model = cases.following(exchange, allow_other_graphs=True)
    for step, build in enumerate((*[cases.deep] * 3, cases.linear), 10):
        cases.publish(exchange, build(step), step=step)
        cases.load(model, step)
        outputs, _ = _outputs(model)
        np.testing.assert_allclose(outputs[0], build(step)(_X), rtol=1e-5)
        assert model.teachers.generation == (2 if step == 13 else 1)
    # Its own graph is not loaded from a peer, even if that is allowed.
    assert len(loads) == 1


def test_a_graph_that_another_worker_refuses_is_forgotten(
    exchange, monkeypatch
):
    model = cases.following(exchange, allow_other_graphs=True)

    def refused(self, reasons):
        """As another worker answers, after this one has loaded it."""
        for index in reasons:
            self._reject(index, "not here")
        return []

    with monkeypatch.context() as patched:
        patched.setattr(agreement.Agreement, "confirm", refused)
        cases.publish(exchange, cases.deep(1), step=10)
        _settle(model)
    assert cases.quarantined(model) == {10: "not here"}
    cases.publish(exchange, cases.linear(2), step=11)
    cases.load(model, 11)
    np.testing.assert_allclose(
        _outputs(model)[0][0], cases.linear(2)(_X), rtol=1e-5
    )
    assert model.teachers.generation == 0


@keras.saving.register_keras_serializable()
class _Elsewhere(keras.layers.Layer):
    def call(self, inputs):
        with tf.device("/job:elsewhere/task:0"):
            return tf.sin(inputs)


def test_a_graph_for_a_device_that_is_not_there_is_refused(exchange):
    student = cases.linear(1)
    peer = keras.Model(student.inputs, _Elsewhere()(student.outputs[0]))
    cases.publish(exchange, peer, step=10)
    model = cases.following(exchange, allow_other_graphs=True)
    _settle(model)
    assert "elsewhere" in cases.quarantined(model)[10]


def _mixed():
    keras.config.set_dtype_policy("mixed_bfloat16")
    student = cases.linear(1)
    keras.config.set_dtype_policy("float32")
    return student


@pytest.mark.parametrize(
    ("build", "dtype"),
    [(lambda: cases.linear(1), tf.float64), (_mixed, tf.float32)],
    ids=["float64_inputs", "mixed"],
)
def test_a_peer_of_another_precision(exchange, build, dtype):
    cases.publish(exchange, build(), spec=cases.input_spec(dtype=dtype))
    model = cases.following(exchange, allow_other_graphs=True)
    cases.load(model, 10)
    outputs, weights = _outputs(model)
    np.testing.assert_allclose(outputs[0], cases.linear(1)(_X), atol=0.05)
    assert outputs[0].dtype == np.float32
    assert weights.all()


# ---- quarantine ----


def _with_nan(seed):
    peer = cases.linear(seed)
    peer.variables[1].assign([0.0, np.nan, 0.0])
    return peer


@pytest.mark.parametrize(
    ("build", "changes", "reason"),
    [
        (cases.deep, {}, "allow_other_graphs=True"),
        (cases.linear, {"outputs": {"outputs": 3}}, "outputs"),
        # The manifest lies about the graph; the bundle has other shapes.
        (cases.deep, {"graph_fingerprint": "own"}, "be float32 [4, 3]"),
        (_with_nan, {"finite": False}, "NaN or infinite"),
    ],
    ids=["graph", "manifest", "variables", "values"],
)
def test_a_version_that_does_not_fit_is_refused(
    exchange, caplog, build, changes, reason
):
    model = cases.following(exchange)
    if "graph_fingerprint" in changes:
        changes = {"graph_fingerprint": model.graph.fingerprint}
    cases.publish(exchange, build(1), **changes)
    _settle(model)
    assert reason in cases.quarantined(model)[10]
    assert model.teachers.status()[0]["step"] == -1
    assert reason in caplog.text


def _overflowing():
    """Finite values whose outputs for `_FAR` are infinite."""
    peer = cases.linear(1)
    for variable in peer.variables:
        variable.assign(tf.fill(variable.shape, 3e38))
    return peer


def test_outputs_that_are_not_finite_are_dropped(
    exchange, caplog, two_replicas
):
    with two_replicas.scope():
        teachers = cases.peers(exchange)
        model = cases.codistill(cases.linear(0), teachers)
    data = tf.data.Dataset.from_tensor_slices((_FAR, _Y)).batch(16)
    cases.prepare(model, data)
    cases.publish(exchange, _overflowing(), step=10)
    cases.load(model, 10)
    logs = cases.fit(model, data, epochs=2)
    assert np.isfinite(logs["loss"]).all()
    assert logs["distillation_weight"] == [0, 0]
    model.teachers.refresh()
    assert not cases.quarantined(model)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            cases.fit(model, data)
            for _ in range(2):
                model.teachers.refresh()
    assert caplog.text.count("3 refreshes in a row") == 1
    assert "3 refreshes in a row" in cases.quarantined(model)[10]
    assert model.teachers.status()[0]["step"] == -1
    # A good version takes its place, and is not charged with the past.
    cases.publish(exchange, cases.linear(2), step=11)
    cases.load(model, 11)
    model.teachers.refresh()
    assert model.teachers.status()[0]["step"] == 11
    assert cases.fit(model, data)["distillation_weight"] == [1]


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


# ---- mistakes ----


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: kinds.Peers(peers=(1, 1)), r"received \(1, 1\)"),
        (lambda: kinds.Peers(peers=1), "received 1"),
        (lambda: kinds.Peers("run/exchange"), "tfdistill.Exchange"),
        (lambda: kinds.Peers(peers=[1]), "needs an exchange"),
        (lambda: kinds.FixedTeacher(3), "received int"),
        (lambda: kinds.OwnPast(1.0), "0.9"),
        (cases.linear, r"FixedTeacher\(model_or_path\)"),
        (lambda: "runs/group_1", r"FixedTeacher\(model_or_path\)"),
        (lambda: [kinds.LabelTeacher("a"), kinds.LabelTeacher("a")], "twice"),
    ],
)
def test_what_is_no_list_of_teachers(make, message):
    with pytest.raises(ValueError, match=message):
        tfdistill.CodistillModel(cases.linear(0), teachers=make())


def test_alone_there_are_no_peers_and_no_threads():
    """As a script is run that was written for many groups."""
    model = tfdistill.CodistillModel(cases.linear(0), teachers=kinds.Peers())
    assert len(model.teachers) == 0
    assert not model.teachers.follows_peers
    model.teachers.start()
    model.teachers.stop()
    assert model.teachers.status() == []
