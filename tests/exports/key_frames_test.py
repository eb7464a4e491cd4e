"""Key frames and deltas in a training: exporter, exchange and teachers."""

import os
import pathlib
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tfdistill.contrib import TopOfChunks
from tfdistill.embedding import layer
from tfdistill.exchange import deltas
from tfdistill.exports import saved_model

_KEY_EVERY = 4
_ROWS = 200


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def _data():
    rng = np.random.default_rng(0)
    x = rng.integers(0, _ROWS, (48, 2)).astype("int32")
    return x, rng.integers(0, 3, 48)


_X, _Y = _data()


def _student(seed):
    """Most of it is a table, of which a step touches eight rows."""
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((2,), dtype="int32")
    found = tfdistill.layers.ShardedEmbedding(_ROWS, 6)(inputs)
    hidden = keras.layers.Dense(8, "tanh")(keras.layers.Flatten()(found))
    return keras.Model(inputs, keras.layers.Dense(3)(hidden))


def _following(exchange, **kwargs):
    model = cases.codistill(_student(0), cases.peers(exchange), **kwargs)
    cases.prepare(model, _X, _Y)
    return model


def _teacher(model):
    return [
        tf.convert_to_tensor(v).numpy() for v in cases.teacher_variables(model)
    ]


def _assert_same_bits(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.tobytes() == theirs.tobytes()


class _Then(keras.callbacks.Callback):
    """Calls a function after each step, once its version is published."""

    def __init__(self, exporter, call):
        super().__init__()
        self._exporter, self._call = exporter, call

    def on_train_batch_end(self, batch, logs=None):
        assert self._exporter._worker.wait_idle(cases.WAIT_SECS)
        student = self._exporter.codistilled.student
        values = [v.numpy() for v in student.variables]
        self._call(int(self.model.optimizer.iterations), values)


def _publish(exchange, call, num_steps, **kwargs):
    """Trains group 1, a version a step."""
    model = cases.codistill(_student(1), optimizer=keras.optimizers.Adagrad())
    exporter = tfdistill.callbacks.StudentExporter(
        exchange, every_steps=1, group=1, key_every=_KEY_EVERY, **kwargs
    )
    cases.fit(
        model,
        _X[: 4 * num_steps],
        _Y[: 4 * num_steps],
        batch_size=4,
        callbacks=[exporter, _Then(exporter, call)],
    )
    return exporter


def _published(values, dtype):
    """What versions leave of a student's values; the first is its table."""
    if dtype in ("int8", "int4"):
        return [
            cases.rounded(value, dtype, by_row=index == 0)
            for index, value in enumerate(values)
        ]
    dtype = dtype or "float32"
    return [tf.cast(tf.cast(v, dtype), v.dtype).numpy() for v in values]


@pytest.mark.parametrize("variables_dtype", [None, "bfloat16", "int8", "int4"])
def test_a_teacher_follows_deltas_bit_for_bit(
    exchange, two_replicas, variables_dtype
):
    """In place, on two replicas; its step is traced once, others see frames."""
    num_traced, sizes, seen = [], {}, []

    def weight(step):
        if not tf.executing_eagerly():
            num_traced.append(step)
        return tf.constant(0.5)

    with two_replicas.scope():
        model = _following(exchange, distillation_weight=weight)

    def follow(step, values):
        cases.load(model, step)
        cases.fit(model, _X[:4], _Y[:4], batch_size=4)
        _assert_same_bits(_teacher(model), _published(values, variables_dtype))
        seen.append(len(num_traced))
        sizes[step] = model.teachers.status()[0]["last_bytes"]
        # To readers of versions there are key frames and nothing else.
        assert exchange.latest(1).step == step - (step - 1) % _KEY_EVERY

    exporter = _publish(exchange, follow, 6, variables_dtype=variables_dtype)
    assert exporter.totals["failed"] == 0 and not cases.quarantined(model)
    assert seen[1] == seen[-1]
    frames = {1, 5}
    most = max(size for step, size in sizes.items() if step not in frames)
    assert most < sizes[1] / 2
    # The last version is whole, though a delta of its step was first.
    assert exchange.deltas.listed(1)[-1] == 6
    assert exchange.steps(1)[-1] == 6
    found = saved_model.read_variables(
        exchange.latest(1).path,
        saved_model.SavedModelWriter(model.graph).variables,
    )
    _assert_same_bits(
        [tf.cast(v, tf.float32).numpy() for v in found], _teacher(model)
    )


def _break(exchange, step, how, model):
    path = pathlib.Path(exchange.deltas.version_path(1, step))
    if how == "lost":
        shutil.rmtree(path)
    elif how in ("torn", "changed"):
        file = path / deltas.FILE_NAME
        end = b"" if how == "torn" else b"\x01\x02\x03\x04\x05"
        file.write_bytes(file.read_bytes()[:-5] + end)
    elif how == "wrong base":
        # What the teacher holds is no version of the frame.
        cases.teacher_variables(model)[1].assign_add(tf.ones([12, 8]))


def test_bad_deltas_keep_the_version_until_one_fits(exchange):
    """A bad one costs itself; after two, the next key frame is waited for."""
    model = _following(exchange)
    bad = {2: "torn", 3: "lost", 4: "wrong base", 6: "changed", 7: "changed"}
    used = {}

    def follow(step, values):
        _break(exchange, step, bad.get(step), model)
        before = _teacher(model)
        if step in (6, 7):
            cases.refresh_until(model, lambda: step in cases.quarantined(model))
        elif step == 8:
            model.teachers.start()
            for _ in range(100):
                model.teachers.refresh()
            model.teachers.stop()
        elif step not in (2, 3):
            # What is lost or too short is no version, and none is missed.
            cases.load(model, step)
        used[step] = model.teachers.status()[0]["step"]
        _assert_same_bits(
            _teacher(model), values if used[step] == step else before
        )

    _publish(exchange, follow, 10)
    assert used == {
        **{1: 1, 2: 1, 3: 1, 4: 4, 5: 5},
        **{6: 5, 7: 5, 8: 5, 9: 9, 10: 10},
    }


def test_a_version_that_was_in_use_before_is_read_by_its_frame(exchange):
    """As a resumed training asks for it; and by one that joins late."""
    versions = {}
    _publish(exchange, versions.__setitem__, 7, choose=TopOfChunks(chunk=4))
    # The last one is whole, too: all take what was there first.
    assert exchange.steps(1)[-1] == exchange.deltas.steps(1)[-1] == 7
    late = _following(exchange)
    cases.load(late, 7)
    resumed = _following(exchange)
    peer = resumed.teachers._teachers[0]
    peer.follower.announce(7)
    peer.follower.stage()
    peer.swap()
    _assert_same_bits(_teacher(resumed), _teacher(late))
    # Rows of tables are exact; of the others one change in four has come.
    table, kernel = (versions[7][index] for index in (0, 1))
    _assert_same_bits([_teacher(late)[0]], [table])
    kernels = [_teacher(late)[1], versions[5][1]]
    assert 0 < np.mean(kernels[0] == kernel) < 1
    assert not np.array_equal(*kernels)


def test_tables_on_servers_are_written_and_compared_alike(
    exchange, monkeypatch
):
    """Their rows are no part of a snapshot, and change while it is written."""
    model, values = _following(exchange), {}
    monkeypatch.setattr(layer.LogicalTable, "is_on_servers", True)
    _publish(exchange, values.__setitem__, 3)
    cases.load(model, 3)
    assert exchange.deltas.steps(1) == [2, 3]
    _assert_same_bits(_teacher(model), values[3])


def test_a_new_training_in_the_process_begins_with_a_key_frame(exchange):
    model = cases.codistill(_student(1))
    exporter = tfdistill.callbacks.StudentExporter(
        exchange, every_steps=1, group=1, key_every=100
    )

    def train():
        then = _Then(exporter, lambda *_: None)
        callbacks = [exporter, then]
        cases.fit(model, _X[:12], _Y[:12], batch_size=4, callbacks=callbacks)

    train()
    assert (exchange.steps(1), exchange.deltas.steps(1)) == ([1, 3], [2, 3])
    shutil.rmtree(exchange.root)
    model.optimizer.iterations.assign(0)
    train()
    assert (exchange.steps(1), exchange.deltas.steps(1)) == ([1, 3], [2, 3])


def test_what_needs_whole_versions_refuses_deltas(exchange):
    exporter = tfdistill.callbacks.StudentExporter(
        exchange, every_steps=2, group=0, key_every=2
    )
    rule = tfdistill.mixing.ModelAveraging()
    mixer = tfdistill.mixing.WeightMixer(rule, every_steps=2, peers=[1])
    model = cases.codistill(_student(0))
    with pytest.raises(ValueError, match="must be whole, key_every=1"):
        cases.fit(model, _X, _Y, callbacks=[exporter, mixer])
    with pytest.raises(ValueError, match="`choose` is for deltas"):
        tfdistill.callbacks.StudentExporter(every_steps=2, choose=TopOfChunks())


def test_what_needs_floats_refuses_what_is_quantized(exchange):
    exporter = tfdistill.callbacks.StudentExporter(
        exchange, every_steps=2, group=0, variables_dtype="int8"
    )
    rule = tfdistill.mixing.ModelAveraging()
    mixer = tfdistill.mixing.WeightMixer(rule, every_steps=2, peers=[1])
    model = cases.codistill(_student(0))
    with pytest.raises(ValueError, match="must be floats; received .*int8"):
        cases.fit(model, _X, _Y, callbacks=[exporter, mixer])
    with pytest.raises(ValueError, match="`choose` picks changes of floats"):
        tfdistill.callbacks.StudentExporter(
            every_steps=2,
            key_every=2,
            choose=TopOfChunks(),
            variables_dtype="int8",
        )
