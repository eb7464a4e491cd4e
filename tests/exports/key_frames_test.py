"""Key frames and deltas in a training: exporter, exchange and teachers."""

import functools
import hashlib
import os
import pathlib
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tests.cases import tiers
from tfdistill.contrib import TopOfChunks
from tfdistill.embedding import tables
from tfdistill.exchange import bases
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


def _student(seed, table=None):
    """Most of it is a table, of which a step touches eight rows."""
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((2,), dtype="int32")
    make = table or (lambda: tfdistill.layers.ShardedEmbedding(_ROWS, 6))
    hidden = keras.layers.Flatten()(make()(inputs))
    hidden = keras.layers.Dense(8, "tanh")(hidden)
    return keras.Model(inputs, keras.layers.Dense(3)(hidden))


def _by_id(seed):
    """The same with a table whose ids come into it as they are met."""
    return _student(
        seed, lambda: tfdistill.layers.DynamicEmbedding(1024, 6, admit_after=2)
    )


def _adapted(seed, backbone=7):
    """Most of it is frozen: a table, and a kernel beside its LoRA weights."""
    keras.utils.set_random_seed(backbone)
    inputs = keras.Input((2,), dtype="int32")
    table = keras.layers.Embedding(_ROWS, 6, trainable=False)
    hidden = keras.layers.Flatten()(table(inputs))
    hidden = keras.layers.BatchNormalization()(hidden)
    dense = keras.layers.Dense(8, "tanh")
    hidden = dense(keras.layers.Dropout(0.1)(hidden))
    model = keras.Model(inputs, keras.layers.Dense(3)(hidden))
    dense.enable_lora(2)
    rng = np.random.default_rng(seed)
    for variable in model.trainable_variables:
        variable.assign(rng.normal(size=variable.shape))
    return model


def _following(exchange, student=None, **kwargs):
    model = cases.codistill(
        student or _student(0), cases.peers(exchange), **kwargs
    )
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


@functools.cache
def _group(build):
    """Group 1's model, traced once, and what its training begins with."""
    model = cases.codistill(build(1), optimizer=keras.optimizers.Adagrad())
    return model, [(v, v.numpy()) for v in model.student.variables]


def _publish(
    exchange, call, num_steps, build=_student, *, num_fits=1, **kwargs
):
    """Trains group 1, a version a step."""
    model, start = _group(build)
    for variable, value in start:
        variable.assign(value)
    model.optimizer.iterations.assign(0)
    exporter = cases.exporter(exchange, group=1, key_every=_KEY_EVERY, **kwargs)
    for _ in range(num_fits):
        cases.fit(
            model,
            _X[: 4 * num_steps],
            _Y[: 4 * num_steps],
            batch_size=4,
            callbacks=[exporter, _Then(exporter, call)],
        )
    return exporter


def _published(values):
    """What 8 bits leave of a student's values; the first is its table."""
    return [
        cases.rounded(value, "int8", by_row=index == 0)
        for index, value in enumerate(values)
    ]


def test_a_teacher_follows_deltas_bit_for_bit(exchange, two_replicas):
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
        _assert_same_bits(_teacher(model), _published(values))
        seen.append(len(num_traced))
        sizes[step] = model.teachers.status()[0]["last_bytes"]
        # To readers of versions there are key frames and nothing else.
        assert exchange.latest(1).step == step - (step - 1) % _KEY_EVERY

    exporter = _publish(exchange, follow, 6, variables_dtype="int8")
    assert exporter.totals["failed"] == 0 and not cases.quarantined(model)
    assert seen[1] == seen[-1]
    # Of the next key frame, too, it reads a delta.
    assert max(size for step, size in sizes.items() if step > 1) < sizes[1] / 2
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


@pytest.mark.deep
def test_versions_carry_the_ids_of_a_table(exchange):
    """In deltas of 8 bits; the keys exactly."""
    model = _following(exchange, _by_id(0))
    rows = []

    def follow(step, values):
        cases.load(model, step)
        teacher = _teacher(model)
        kept = [value.dtype == np.int64 for value in values]
        assert [value.dtype == np.int64 for value in teacher] == kept
        for ours, theirs in zip(teacher, values, strict=True):
            if theirs.dtype == np.int64:
                np.testing.assert_array_equal(ours, theirs)
            else:
                np.testing.assert_allclose(ours, theirs, atol=0.01)
        keys = np.concatenate([v for v in values if v.dtype == np.int64])
        rows.append((keys > 0).sum())

    _publish(exchange, follow, 6, _by_id, variables_dtype="int8")
    assert rows[0] < rows[-1]
    assert not cases.quarantined(model)
    sizes = [model.teachers.status()[0]["last_bytes"]]
    assert sizes[0] < exchange.latest(1).num_bytes / 3


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
    bad = {2: "torn", 3: "lost", 4: "wrong base"}
    bad |= {6: "changed", 7: "changed", 9: "changed"}
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


@pytest.mark.parametrize("what", ["frame", *map(tiers.deep, ("delta", "base"))])
def test_what_is_not_in_sight_yet_is_waited_for(exchange, tmp_path, what):
    """Of a late reader: a storage shows files in any order, and late."""
    is_frozen, values = what == "base", {}
    model = _following(exchange, _adapted(0, backbone=8) if is_frozen else None)
    build = _adapted if is_frozen else _student
    _publish(exchange, values.__setitem__, 3, build)
    shutil.rmtree(exchange.version_path(1, 3))
    hidden = pathlib.Path(
        {
            "frame": exchange.version_path(1, 1),
            "delta": exchange.deltas.version_path(1, 3) + "/delta.bin",
            "base": exchange.bases.root,
        }[what]
    )
    hidden.rename(tmp_path / "hidden")
    (peer,) = model.teachers
    cases.refresh_until(model, lambda: peer.follower.is_absent)
    (tmp_path / "hidden").rename(hidden)
    cases.load(model, 3)
    _assert_same_bits(_teacher(model), values[3])
    assert not cases.quarantined(model)


def test_a_version_that_was_in_use_before_is_read_by_its_frame(exchange):
    """As a resumed training asks for it; and by one that joins late.

    Both come to hold what one does that has read each version.
    """
    versions, hears_all = {}, _following(exchange)

    def follow(step, values):
        versions[step] = values
        cases.load(hears_all, step)
        if step == 5:
            # It reads a delta of it, and holds what a key frame does: all.
            _assert_same_bits(_teacher(hears_all), values)

    _publish(exchange, follow, 7, choose=TopOfChunks(chunk=4))
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
    _assert_same_bits(_teacher(hears_all), _teacher(late))
    assert not cases.quarantined(hears_all)
    # Rows of tables are exact; of the others one change in four has come.
    table, kernel = (versions[7][index] for index in (0, 1))
    _assert_same_bits([_teacher(late)[0]], [table])
    kernels = [_teacher(late)[1], versions[5][1]]
    assert 0 < np.mean(kernels[0] == kernel) < 1
    assert not np.array_equal(*kernels)


def test_a_second_fit_goes_on_with_deltas_that_all_can_read(exchange):
    """The first ended with a whole version, which holds what was left out."""
    model = _following(exchange)

    def follow(step, values):
        cases.load(model, step)
        _assert_same_bits(_teacher(model)[:1], values[:1])

    choose = TopOfChunks(chunk=4)
    _publish(exchange, follow, 3, num_fits=2, choose=choose)
    assert exchange.steps(1) == [1, 3, 6]
    assert exchange.deltas.steps(1) == [2, 3, 4, 5, 6]
    late = _following(exchange)
    cases.load(late, 6)
    _assert_same_bits(_teacher(model), _teacher(late))
    assert not cases.quarantined(model) and not cases.quarantined(late)


def test_tables_on_servers_are_written_and_compared_alike(
    exchange, monkeypatch
):
    """Their rows are no part of a snapshot, and change while it is written."""
    model, values = _following(exchange), {}
    monkeypatch.setattr(tables.Table, "is_on_servers", True)
    _publish(exchange, values.__setitem__, 3)
    cases.load(model, 3)
    assert exchange.deltas.steps(1) == [2, 3]
    _assert_same_bits(_teacher(model), values[3])


def test_a_new_training_in_the_process_begins_with_a_key_frame(exchange):
    for _ in range(2):
        _publish(exchange, lambda *_: None, 3)
        assert exchange.steps(1) == [1, 3]
        assert exchange.deltas.steps(1) == [2, 3]
        shutil.rmtree(exchange.root)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"key_every": 2}, "key_every=1"),
        ({"variables_dtype": "int8"}, "must be floats; received .*int8"),
    ],
)
def test_a_mixer_refuses_versions_that_are_not_whole_and_exact(
    exchange, options, match
):
    exporter = cases.exporter(exchange, 2, **options)
    rule = tfdistill.mixing.ModelAveraging()
    mixer = tfdistill.mixing.WeightMixer(rule, every_steps=2, peers=[1])
    with pytest.raises(ValueError, match=match):
        cases.fit(
            cases.codistill(_student(0)), _X, _Y, callbacks=[exporter, mixer]
        )


@pytest.mark.parametrize(
    "options", [{}, {"key_every": 2, "variables_dtype": "int8"}]
)
def test_changes_are_chosen_of_deltas_of_floats(options):
    with pytest.raises(ValueError, match="`choose` "):
        tfdistill.callbacks.StudentExporter(
            every_steps=2, choose=TopOfChunks(), **options
        )


# ---- students of which most is frozen ----


def _own_bytes(model):
    """Bytes of variables that only the teacher holds, and of the student."""
    ours = {id(v.value): v.value for v in model.student.variables}
    theirs = [v for v in cases.teacher_variables(model) if id(v) not in ours]
    return [
        sum(v.numpy().nbytes for v in found)
        for found in (theirs, ours.values())
    ]


def _assert_predicts_as_the_last_whole_one(model, exchange):
    whole = tf.saved_model.load(exchange.latest(1).path)
    infer = tf.function(model.teachers._teachers[0]._copy.infer)
    (found,) = infer(tf.constant(_X))
    _assert_same_bits([found.numpy()], [whole.serve(tf.constant(_X)).numpy()])


def _bases(exchange):
    return sorted(pathlib.Path(exchange.bases.root).iterdir())


@pytest.mark.parametrize("replicas", [1, tiers.deep(2)])
def test_what_is_frozen_is_published_once_and_shared(
    exchange, replicas, two_replicas, monkeypatch
):
    """Nobody who has it reads it, or holds it twice; bits are those of fit."""
    strategy = two_replicas if replicas == 2 else tf.distribute.get_strategy()
    with strategy.scope():
        model = _following(exchange, _adapted(0))
    monkeypatch.setattr(bases.Bases, "read", None)
    sizes = {}

    def follow(step, values):
        cases.load(model, step)
        cases.fit(model, _X[:4], _Y[:4], batch_size=4)
        _assert_same_bits(_teacher(model), values)
        sizes[step] = model.teachers.status()[0]["last_bytes"]

    exporter = _publish(exchange, follow, 6, _adapted)
    assert exporter.totals["failed"] == 0 and not cases.quarantined(model)
    own, students = _own_bytes(model)
    assert own < students / 5
    (base,) = _bases(exchange)
    assert hashlib.sha256(base.read_bytes()).hexdigest() == base.name
    assert max(sizes.values()) < base.stat().st_size / 5
    # Whole ones are there for others, the first and the last among them.
    assert exchange.steps(1)[-1] == 6
    _assert_predicts_as_the_last_whole_one(model, exchange)


@pytest.mark.deep
@pytest.mark.parametrize("variables_dtype", [None, "int8"])
def test_a_teacher_of_another_backbone_holds_its_own(exchange, variables_dtype):
    """Its base is read once; the student's stays the student's."""
    model = _following(exchange, _adapted(0, backbone=8))
    before = [v.numpy() for v in model.student.variables]
    reads, read = [], bases.Bases.read

    def counted(self, *args):
        reads.append(args)
        return read(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bases.Bases, "read", counted)

        def follow(step, values):
            cases.load(model, step)
            if variables_dtype is None:
                _assert_same_bits(_teacher(model), values)

        _publish(exchange, follow, 6, _adapted, variables_dtype=variables_dtype)
    assert len(reads) == 1 and model.teachers.generation == 1
    _assert_predicts_as_the_last_whole_one(model, exchange)
    if variables_dtype is None:
        own, students = _own_bytes(model)
        assert own == students
    cases.fit(model, _X[:4], _Y[:4], batch_size=4)
    frozen = model.graph.frozen
    assert len(frozen) == 2
    for index in frozen:
        ours = model.student.variables[index].numpy()
        _assert_same_bits([ours], [before[index]])


@pytest.mark.parametrize("how", ["another", *map(tiers.deep, ("lost", "torn"))])
def test_a_bad_base_is_refused_by_name_and_a_whole_version_is_read(
    exchange, how
):
    model = _following(exchange, _adapted(0, backbone=8))

    def follow(step, values):
        (base,) = _bases(exchange)
        if step == 2:
            right = base.read_bytes()
            base.write_bytes(right[:-1] + b"?" * (how == "another"))
            if how == "lost":
                base.unlink()
            if how == "another":
                cases.load(model, 1)
                assert base.name in cases.quarantined(model)[2]
                assert "the same frozen weights" in cases.quarantined(model)[2]
        elif step > 2:
            # Once it holds the base, it needs it no longer.
            cases.load(model, step)
            _assert_same_bits(_teacher(model), values)
            is_right = (
                hashlib.sha256(base.read_bytes()).hexdigest() == base.name
            )
            assert is_right or how == "another"

    _publish(exchange, follow, 4, _adapted)


def test_frozen_weights_that_move_travel(exchange, caplog):
    """As an average that something else than the optimizer keeps."""
    model = _following(exchange, _adapted(0))

    def follow(step, values):
        cases.load(model, step)
        _assert_same_bits(_teacher(model), values)
        if step in (2, 3, 4):
            table = _group(_adapted)[0].student.layers[1].embeddings
            table.assign_add(np.ones([_ROWS, 6]))

    _publish(exchange, follow, 6, _adapted)
    assert caplog.text.count("Frozen weights have changed") == 1
    assert len(_bases(exchange)) == 1


@pytest.mark.deep
def test_a_student_that_is_no_longer_frozen_leaves_the_teacher_as_it_is(
    exchange,
):
    model = _following(exchange, _adapted(0))
    _publish(exchange, lambda *_: None, 2, _adapted)
    cases.load(model, 2)
    before = _teacher(model)
    model.student.layers[1].trainable = True
    model.compile(
        keras.optimizers.SGD(1.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        distillation_loss=tfdistill.losses.ForwardKL(),
    )
    table = model.student.layers[1].embeddings.numpy()
    cases.fit(model, _X[:4], _Y[:4], batch_size=4)
    assert not np.array_equal(model.student.layers[1].embeddings, table)
    _assert_same_bits(_teacher(model), before)


@pytest.mark.deep
def test_the_first_version_may_be_a_delta_of_a_frame_of_the_burn_in(exchange):
    model, values = _following(exchange), {}
    (peer,) = model.teachers
    peer.follower._wanted = lambda version: version.step > 1
    kept = cases.quarantined(model)

    def follow(step, now):
        values[step] = now
        if step == 3:
            cases.load(model, 3)

    _publish(exchange, follow, 4)
    assert exchange.steps(1) == [1, 4] and not kept
    _assert_same_bits(_teacher(model), values[3])
