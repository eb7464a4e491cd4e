"""What must always hold: section 4 of the design, by its numbers.

Here as far as one process shows it; two logical devices stand for replicas. Of
the others, 1, 4, 9 and 12 are in model_test.py and tests/teachers, 3 and 8 in
cluster_test.py, 6 in tests/exchange, and 11 in tests/launcher.
"""

import logging
import pathlib
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tfdistill import losses
from tfdistill import schedules

_X, _Y = cases.data()
_WAIT_SECS = 60.0


def _values(model):
    return [v.numpy() for v in model.student.variables]


def test_01_in_burn_in_it_is_plain_training(exchange):
    plain = cases.codistill(cases.deep(0), optimizer="adam")
    taught = cases.codistill(
        cases.deep(0),
        cases.peers(exchange),
        optimizer="adam",
        distillation_weight=schedules.BurnIn(steps=1000),
    )
    cases.prepare(taught, _X, _Y)
    # Of a group that is past it.
    cases.publish(exchange, cases.deep(1), step=1000)
    cases.load(taught, 1000)
    for model in (plain, taught):
        logs = cases.fit(model, _X, _Y, batch_size=5, epochs=3)
    assert logs["distillation_weight"] == [0, 0, 0]
    cases.assert_close(taught, plain)


def _two_outputs(seed):
    inputs = keras.Input((4,))
    outputs = {
        "kind": keras.layers.Dense(3, name="kind")(inputs),
        "size": keras.layers.Dense(1, name="size")(inputs),
    }
    model = keras.Model(inputs, outputs)
    cases.randomize(model, seed)
    return model


def _replicated_data():
    """27 examples, 3 in the last batch."""
    x, y = cases.data(27)
    return tf.data.Dataset.from_tensor_slices(
        (x, {"kind": y, "size": x[:, :1]})
    ).batch(8)


def _train_replicated(strategy, exchange):
    with strategy.scope():
        model = cases.codistill(
            _two_outputs(0),
            cases.peers(exchange),
            optimizer=keras.optimizers.SGD(0.3, momentum=0.9, clipnorm=0.05),
            loss={
                "kind": keras.losses.SparseCategoricalCrossentropy(True),
                "size": "mse",
            },
            distillation_loss={
                "kind": losses.ForwardKL(temperature=2.0),
                "size": None,
            },
            steps_per_execution=3,
        )
    cases.prepare(model, _replicated_data())
    cases.load(model, 10)
    return cases.fit(model, _replicated_data(), epochs=2), _values(model)


@pytest.mark.deep
def test_02_same_update_at_any_replica_count(two_replicas, exchange):
    """Other trainings are in the table of tests/cases/training.py."""
    spec = _replicated_data().element_spec[0]
    cases.publish(exchange, _two_outputs(1), spec=spec)
    one = tf.distribute.get_strategy()
    expected_logs, expected = _train_replicated(one, exchange)
    logs, found = _train_replicated(two_replicas, exchange)
    assert logs["distillation_weight"] == [1, 1]
    assert logs["distillation_loss"][0] > 0
    assert logs.keys() == expected_logs.keys()
    for key, value in expected_logs.items():
        np.testing.assert_allclose(
            logs[key], value, rtol=1e-5, atol=3e-6, err_msg=key
        )
    cases.assert_close(found, expected, rtol=1e-5, atol=3e-6)


def test_05_training_waits_for_no_write_and_no_read(exchange):
    release = threading.Event()
    publish, read = exchange.publish, exchange.latest
    reading, writing = threading.Event(), threading.Event()

    def slow_publish(*args, **kwargs):
        writing.set()
        assert release.wait(_WAIT_SECS)
        return publish(*args, **kwargs)

    def slow_read(group, **kwargs):
        reading.set()
        assert release.wait(_WAIT_SECS)
        return read(group, **kwargs)

    cases.publish(exchange, cases.linear(1))
    exchange.publish, exchange.latest = slow_publish, slow_read
    model = cases.codistill(cases.linear(0), cases.peers(exchange))

    class Release(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            assert reading.wait(_WAIT_SECS)
            assert writing.wait(_WAIT_SECS)

        def on_epoch_end(self, epoch, logs=None):
            # Sixteen steps are done while both threads still stand.
            assert int(self.model.optimizer.iterations) == 16
            assert not release.is_set()
            release.set()

    exporter = cases.exporter(exchange)
    loader = tfdistill.callbacks.TeacherLoader(every_steps=1)
    cases.fit(
        model, _X, _Y, batch_size=1, callbacks=[exporter, loader, Release()]
    )
    assert exporter.totals["skipped"] == 15
    assert exchange.steps(0) == [1, 16]


def test_07_a_bad_teacher_is_quarantined(exchange, caplog):
    """Another architecture is under 10."""
    cases.publish(exchange, cases.linear(1), step=1)
    model = cases.codistill(cases.linear(0), cases.peers(exchange))
    cases.prepare(model, _X, _Y)
    cases.load(model, 1)
    version = cases.publish(exchange, cases.linear(1), step=2)
    path = next(pathlib.Path(version.path, "variables").glob("*data*"))
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(bytes(content))
    with caplog.at_level(logging.WARNING):
        cases.refresh_until(model, lambda: cases.quarantined(model))
        logs = cases.fit(
            model,
            _X,
            _Y,
            epochs=3,
            callbacks=[tfdistill.callbacks.TeacherLoader(every_steps=1)],
        )
    # The last good version goes on teaching.
    assert logs["distillation_weight"] == [1, 1, 1]
    assert model.teachers.status()[0]["step"] == 1
    assert list(cases.quarantined(model)) == [2]
    assert caplog.text.count("Quarantined version 2 of group 1") == 1
    cases.publish(exchange, cases.linear(3), step=3)
    cases.load(model, 3)


@pytest.mark.parametrize("peer", ["same", "other"])
def test_10_a_peers_graph_is_not_executed(exchange, monkeypatch, peer):
    model = cases.codistill(cases.linear(0), cases.peers(exchange))
    cases.prepare(model, _X, _Y)
    cases.publish(
        exchange, {"same": cases.linear, "other": cases.deep}[peer](1)
    )

    def refuse(*_, **__):
        raise AssertionError("a peer's SavedModel was loaded")

    monkeypatch.setattr(tf.saved_model, "load", refuse)
    monkeypatch.setattr(tf.saved_model.experimental, "Fingerprint", refuse)
    if peer == "same":
        # Not even a graph file that is no graph matters.
        cases.load(model, 10)
    else:
        cases.refresh_until(model, lambda: cases.quarantined(model))
    assert (model.teachers.status()[0]["step"] == 10) == (peer == "same")
    cases.fit(model, _X, _Y)


# ---- 12: nothing is silently ignored ----
