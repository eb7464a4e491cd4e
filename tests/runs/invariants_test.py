"""What must always hold: section 4 of the design, one by one.

Here as far as one process shows it; two logical devices stand for replicas.
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
from tfdistill.teachers import worth

_X, _Y = cases.data()
_WAIT_SECS = 60.0


def _values(model):
    return [v.numpy() for v in model.student.variables]


def _assert_bit_equal(one, other):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


# ---- 1: the exact algorithm ----


def test_01_exact_algorithm(exchange):
    """loss = task + w * psi(mean of the teachers' predictions, own)."""
    for group in (1, 2):
        cases.publish(exchange, cases.linear(group), group=group)
    model = cases.codistill(
        cases.linear(0),
        cases.peers(exchange, (1, 2)),
        distillation_weight=0.6,
    )
    cases.prepare(model, _X, _Y)
    cases.load(model, 10, 10)
    kernel, bias = _values(model)

    def predict(seed):
        k, b = [v.numpy() for v in cases.linear(seed).variables]
        return cases.softmax(_X @ k + b)

    mean, own = (predict(1) + predict(2)) / 2, predict(0)
    hard = np.eye(3)[_Y]
    task = -(hard * np.log(own)).sum(-1).mean()
    psi = -(mean * np.log(own)).sum(-1).mean()
    gradient = ((own - hard) + 0.6 * (own - mean)) / len(_X)
    logs = cases.fit(model, _X, _Y, batch_size=16)
    assert logs["task_loss"][0] == pytest.approx(task, rel=1e-5)
    assert logs["distillation_loss"][0] == pytest.approx(psi, rel=1e-5)
    assert logs["loss"][0] == pytest.approx(task + 0.6 * psi, rel=1e-5)
    found = _values(model)
    np.testing.assert_allclose(
        found[0], kernel - 0.1 * _X.T @ gradient, atol=1e-6
    )
    np.testing.assert_allclose(
        found[1], bias - 0.1 * gradient.sum(0), atol=1e-6
    )


@pytest.fixture(scope="module")
def plain():
    """The weights of a training without any teacher."""
    model = cases.codistill(cases.deep(0), optimizer="adam")
    cases.fit(model, _X, _Y, batch_size=5, epochs=3, callbacks=[])
    return _values(model)


@pytest.mark.parametrize("reason", ["burn_in", "bad_teacher"])
def test_01_without_distillation_it_is_plain_training(exchange, plain, reason):
    burn_in = schedules.BurnIn(steps=1000 if reason == "burn_in" else 0)
    model = cases.codistill(
        cases.deep(0),
        cases.peers(exchange),
        optimizer="adam",
        distillation_weight=burn_in,
    )
    cases.prepare(model, _X, _Y)
    if reason == "burn_in":
        # Of a group that is past it.
        cases.publish(exchange, cases.deep(1), step=1000)
        cases.load(model, 1000)
    if reason == "bad_teacher":
        peer = cases.deep(1)
        peer.variables[-1].assign(tf.fill([3], 3e38))
        peer.variables[-2].assign(tf.fill([5, 3], 3e38))
        peer.variables[1].assign(tf.fill([5], 9.0))
        cases.publish(exchange, peer)
        cases.load(model, 10)
        assert not np.isfinite(peer(_X)).any()
    logs = cases.fit(model, _X, _Y, batch_size=5, epochs=3)
    assert logs["distillation_weight"] == [0, 0, 0]
    _assert_bit_equal(_values(model), plain)


def test_01_no_gradient_reaches_a_teacher(exchange, two_replicas):
    with two_replicas.scope():
        model = cases.codistill(cases.deep(0), cases.peers(exchange))
    data = tf.data.Dataset.from_tensor_slices((_X, _Y)).batch(8).repeat()
    cases.prepare(model, data, steps_per_epoch=1)
    cases.publish(exchange, cases.deep(1))
    cases.load(model, 10)
    teacher = cases.teacher_variables(model)
    before = [v.numpy() for v in teacher]
    student = _values(model)
    cases.fit(model, data, steps_per_epoch=20)
    _assert_bit_equal([v.numpy() for v in teacher], before)
    assert not np.array_equal(_values(model)[0], student[0])
    assert not any(v is t for v in model.optimizer.variables for t in teacher)


def test_01_teachers_run_in_inference_mode(exchange):
    def build(seed):
        student = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.9),
                keras.layers.Dense(3),
            ]
        )
        cases.randomize(student, seed)
        return student

    cases.publish(exchange, build(1))
    model = cases.codistill(build(0), cases.peers(exchange))
    cases.prepare(model, _X, _Y)
    cases.load(model, 10)
    teacher = cases.teacher_variables(model)
    before = [v.numpy() for v in teacher]
    asked = []
    ask = model.teachers.ask

    def noted(*args, **kwargs):
        soft = ask(*args, **kwargs)
        tf.py_function(
            lambda value: asked.append(value.numpy()), [soft.outputs[0][0]], []
        )
        return soft

    model.teachers.ask = noted
    model.make_train_function(force=True)
    cases.fit(model, _X, _Y, batch_size=16, epochs=2)
    expected = build(1)(_X, training=False)
    assert len(asked) == 2
    for found in asked:
        np.testing.assert_allclose(found, expected, rtol=1e-4)
    # Moving statistics and the state of the dropout too.
    _assert_bit_equal([v.numpy() for v in teacher], before)


# ---- 2: the same update at any replica count ----


def _two_outputs(seed):
    inputs = keras.Input((4,))
    outputs = {
        "kind": keras.layers.Dense(3, name="kind")(inputs),
        "size": keras.layers.Dense(1, name="size")(inputs),
    }
    model = keras.Model(inputs, outputs)
    cases.randomize(model, seed)
    return model


def _scce():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


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
            [
                cases.peers(exchange, [1]),
                cases.peers(exchange, [2], weight=2.0),
            ],
            optimizer=keras.optimizers.SGD(0.3, momentum=0.9, clipnorm=0.05),
            loss={"kind": _scce(), "size": "mse"},
            distillation_loss={
                "kind": losses.ForwardKL(temperature=2.0),
                "size": None,
            },
            steps_per_execution=3,
        )
    cases.prepare(model, _replicated_data())
    cases.load(model, 10, 10)
    return cases.fit(model, _replicated_data(), epochs=2), _values(model)


@pytest.mark.slow("two trainings with two teachers each are traced")
def test_02_same_update_at_any_replica_count(two_replicas, exchange):
    """Other trainings are in the table of tests/cases/training.py."""
    spec = _replicated_data().element_spec[0]
    for group in (1, 2):
        cases.publish(exchange, _two_outputs(group), group=group, spec=spec)
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
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=3e-6)


# ---- 3: one version in all workers of a group ----
# The protocol is tried in many interleavings in peer_reader_test.py, and with
# real workers in cluster_run_test.py.


# ---- 4: a refresh never retraces ----


class _Traced(keras.layers.Layer):
    """Counts how often Python runs it: once for each trace."""

    traces = 0

    def call(self, x):
        _Traced.traces += 1
        return x * 2.0


def _traced(seed):
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(5)(_Traced()(inputs))
    model = keras.Model(inputs, keras.layers.Dense(3)(hidden))
    cases.randomize(model, seed)
    return model


def test_04_a_refresh_never_retraces(exchange, two_replicas, monkeypatch):
    # Whatever the peer's weights are worth.
    monkeypatch.setattr(worth, "_LEAST_COUNT", 10**9)
    with two_replicas.scope():
        model = cases.codistill(
            _traced(0),
            cases.peers(exchange),
            optimizer=keras.optimizers.SGD(0.0),
        )
    data = tf.data.Dataset.from_tensor_slices((_X, _Y)).batch(16)
    traces, seen = None, []
    peer = _traced(1)
    # More are made by tests/runs/swaps_test.py.
    num_swaps = 3
    for step in range(10, 11 + num_swaps):
        cases.randomize(peer, step)
        cases.publish(exchange, peer, step=step)
        # Publishing traces the peer; training and swapping must not.
        before = _Traced.traces
        if traces is None:
            cases.prepare(model, data)
        cases.load(model, step)
        logs = cases.fit(model, data)
        seen.append(logs["distillation_loss"][0])
        if traces is None:
            traces = _Traced.traces - before
            assert traces > 0
        else:
            assert _Traced.traces == before, f"retraced at version {step}"
        target = cases.softmax(peer(_X).numpy())
        own = np.log(cases.softmax(model.student(_X).numpy()))
        # The new values are used at once.
        assert seen[-1] == pytest.approx(
            -(target * own).sum(-1).mean(), rel=1e-4
        )
    assert len(set(seen)) == 1 + num_swaps
    assert model.teachers.generation == 0


# ---- 5: training never waits ----


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

    exporter = tfdistill.callbacks.StudentExporter(
        exchange, every_steps=1, group=0
    )
    loader = tfdistill.callbacks.TeacherLoader(every_steps=1)
    cases.fit(
        model,
        _X,
        _Y,
        batch_size=1,
        callbacks=[exporter, loader, Release()],
    )
    assert exporter.totals["skipped"] == 15
    assert exchange.steps(0) == [1, 16]


# ---- 6: visible only when whole ----


def test_06_a_version_is_visible_only_when_whole(exchange, monkeypatch):
    """The writer fails before each of its files; readers look meanwhile."""
    # From the second version on no file is TensorFlow's own to write.
    student = cases.linear(1)
    cases.publish(exchange, student, step=1)
    reader = tfdistill.Exchange(exchange.root)
    save, gfile = tf.raw_ops.SaveV2, tf.io.gfile.GFile
    writes = []

    def look(fail_at):
        assert reader.steps(1) == [1]
        assert reader.latest(1).step == 1
        writes.append(1)
        if len(writes) == fail_at:
            raise OSError("killed")

    def count(fail_at):
        writes.clear()

        def noted_save(**kwargs):
            look(fail_at)
            return save(**kwargs)

        def noted_file(path, mode="r"):
            if "w" in mode and exchange.root in path:
                look(fail_at)
            return gfile(path, mode)

        with monkeypatch.context() as patch:
            patch.setattr(tf.raw_ops, "SaveV2", noted_save)
            patch.setattr(tf.io.gfile, "GFile", noted_file)
            cases.publish(exchange, student, step=2)

    for fail_at in (1, 2, 3):
        with pytest.raises(RuntimeError, match="killed"):
            count(fail_at)
        assert len(writes) == fail_at
        assert reader.steps(1) == [1]
    count(fail_at=None)
    assert len(writes) >= 3
    assert reader.steps(1) == [1, 2]
    reader.verify(reader.open(1, 2))


# ---- 7: a bad teacher is quarantined, not obeyed ----


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


# ---- 8: groups fail alone: cluster_run_test.py, by killing them ----


# ---- 9: only the student is saved ----


def test_09_only_the_student_is_saved(exchange, tmp_path):
    cases.publish(exchange, cases.deep(1))
    model = cases.codistill(
        cases.deep(0), cases.peers(exchange), optimizer="adam"
    )
    cases.prepare(model, _X, _Y)
    cases.load(model, 10)
    exporter = tfdistill.callbacks.StudentExporter(
        exchange, every_steps=1, group=0
    )
    cases.fit(model, _X, _Y, callbacks=[exporter, cases.never()])
    shapes = sorted(tuple(v.shape) for v in model.student.variables)
    assert sorted(tuple(v.shape) for v in model.weights) == shapes
    assert len(model.trainable_variables) == 4

    model.save(tmp_path / "student.keras")
    loaded = keras.models.load_model(tmp_path / "student.keras")
    assert not isinstance(loaded, tfdistill.CodistillModel)
    assert sorted(tuple(v.shape) for v in loaded.variables) == shapes
    model.export(str(tmp_path / "export"), verbose=False)
    for path in (tmp_path / "export", exchange.latest(0).path):
        found = tf.saved_model.load(str(path))
        trackables = getattr(found, "model_variables", None) or found.variables
        assert sorted(tuple(v.shape) for v in trackables) == shapes

    saved = tf.train.Checkpoint(model).save(str(tmp_path / "checkpoint"))
    plain = cases.codistill(cases.deep(0), optimizer="adam")
    cases.fit(plain, _X, _Y, callbacks=[])
    expected = tf.train.Checkpoint(plain).save(str(tmp_path / "plain"))

    def sizes(path):
        shapes = tf.train.load_checkpoint(path).get_variable_to_shape_map()
        return sum(int(np.prod(shape)) for shape in shapes.values())

    assert sizes(saved) == sizes(expected)


# ---- 10: a peer's graph is not executed by default ----


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


# ---- 11: every wait is bounded: cluster_run_test.py, background_test.py ----


# ---- 12: nothing is silently ignored ----


_MISTAKES = {
    "no loss for teachers": (
        lambda e: tfdistill.CodistillModel(
            cases.linear(), teachers=cases.peers(e)
        ).compile("sgd", "mse"),
        "distillation_loss",
    ),
    "peers without an exchange": (
        lambda e: cases.codistill(cases.linear(), cases.peers(None)),
        "exchange",
    ),
    "a task loss as distillation loss": (
        lambda e: cases.codistill(
            cases.linear(),
            cases.peers(e),
            distillation_loss=keras.losses.KLDivergence(),
        ),
        "DistillationLoss",
    ),
}


@pytest.mark.parametrize("mistake", _MISTAKES)
def test_12_nothing_is_silently_ignored(exchange, mistake):
    make, message = _MISTAKES[mistake]
    with pytest.raises(ValueError, match=message):
        make(exchange)
