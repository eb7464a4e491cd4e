"""Peers that are judged by the student's own batches: there is no canary."""

import json
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases

_X, _ = cases.data(64)
_REPORTS = 4


def _sharp(seed, factor):
    model = cases.linear(seed)
    model.set_weights([factor * w for w in model.get_weights()])
    return model


def _rotated(weights):
    return [np.roll(w, 1, axis=-1) for w in weights]


# By kind of peer: its weights, from those of a student that knows the labels;
# what it counts; and what is said of it.
_PEERS = {
    "honest": (lambda ws: ws, 1.0, ""),
    "half_as_sure": (lambda ws: [w / 8 for w in ws], 1.0, "may be bad"),
    "base_rates": (lambda ws: [0 * w for w in ws], 0.0, "no weight"),
    "rotated": (_rotated, 0.0, "no weight"),
}


def _after_steps(model, *data, count=_REPORTS):
    """Trains and refreshes; returns what the teachers counted at last."""
    for _ in range(count):
        logs = cases.fit(model, *data, batch_size=256)
        model.teachers.refresh(step=int(model.optimizer.iterations))
    return logs["distillation_weight"][-1]


@pytest.mark.parametrize(
    "kind",
    [
        *("honest", "base_rates"),
        pytest.param("half_as_sure", marks=pytest.mark.deep),
        pytest.param("rotated", marks=pytest.mark.deep),
    ],
)
def test_a_peer_that_has_learned_nothing_has_no_weight(kind, exchange, caplog):
    changed, counts, said = _PEERS[kind]
    student, peer = _sharp(0, 9), cases.linear(0)
    peer.set_weights(changed(student.get_weights()))
    labels = np.argmax(student(_X), axis=-1)
    model = cases.codistill(
        student, cases.peers(exchange), optimizer=keras.optimizers.SGD(0.0)
    )
    cases.prepare(model, _X, labels)
    cases.publish(exchange, peer, step=10)
    cases.load(model, 10)
    with caplog.at_level(logging.WARNING):
        assert _after_steps(model, _X, labels) == counts
    assert ("group_1" in caplog.text) == bool(said)
    assert said in caplog.text
    (status,) = model.teachers.status()
    assert status["own_loss"] < status["base_loss"]
    assert status["teacher_loss"] >= status["own_loss"]
    assert f"{status['teacher_loss']:.3g}" in caplog.text or not said
    if not counts:
        # It is still asked, and its next version may be better.
        peer.set_weights(student.get_weights())
        cases.publish(exchange, peer, step=20)
        cases.load(model, 20)
        assert _after_steps(model, _X, labels, count=8) == 1.0


_SEQUENCES = keras.utils.pad_sequences([[1, 2, 3], [2]], padding="post")


@pytest.mark.parametrize(
    ("mask_zero", "weights", "expected"),
    [
        pytest.param(True, None, 4, marks=pytest.mark.deep),
        pytest.param(False, None, 6, marks=pytest.mark.deep),
        pytest.param(False, [[1.0] * 3, [0.0] * 3], 3, marks=pytest.mark.deep),
        (True, [[1.0] * 3, [0.0] * 3], 4),
    ],
)
def test_predictions_that_do_not_count_are_left_out(
    exchange, mask_zero, weights, expected
):
    """Padded tokens, or else those of no weight."""
    keras.utils.set_random_seed(0)
    student = keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            keras.layers.Embedding(4, 5, mask_zero=mask_zero),
        ]
    )
    model = cases.codistill(student, cases.peers(exchange))
    data = _SEQUENCES, _SEQUENCES
    weights = weights and np.array(weights)
    spec = tf.TensorSpec([None, 3], tf.int32)
    cases.prepare(model, *data)
    cases.publish(exchange, student, step=10, spec=spec)
    cases.load(model, 10)
    cases.fit(model, *data, sample_weight=weights, batch_size=2)
    model.teachers.refresh(step=1)
    (teacher,) = model.teachers
    assert teacher.record._means()[0] == expected


def test_clicks_that_are_predicted_too_often_are_reported(exchange, caplog):
    student, peer = cases.linear(0, classes=1), cases.linear(0, classes=1)
    x, _ = cases.data(2048)
    chance = tf.sigmoid(student(x)[:, 0]).numpy()
    clicks = np.random.default_rng(0).random(2048) < chance
    kernel, bias = student.get_weights()
    peer.set_weights([kernel, bias + 0.5])
    model = cases.codistill(
        student,
        cases.peers(exchange),
        optimizer=keras.optimizers.SGD(0.0),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        distillation_loss=tfdistill.losses.BinarySoftTargetCrossEntropy(),
    )
    data = x, clicks.astype("float32")
    cases.prepare(model, *data)
    cases.publish(exchange, peer, step=10)
    cases.load(model, 10)
    with caplog.at_level(logging.WARNING):
        cases.fit(model, *data, batch_size=256)
        assert "on the logit" not in caplog.text
        for start in range(0, 2048, 256):
            part = [values[start : start + 256] for values in data]
            _after_steps(model, *part, count=1)
    json.dumps(model.teachers.state())
    assert "group_1 predicts" in caplog.text
