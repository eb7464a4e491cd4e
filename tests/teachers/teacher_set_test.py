"""The teachers of one student, followed and refreshed, and fixed ones."""

import logging
import pathlib
import shutil
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tfdistill.exchange import manifest
from tfdistill.teachers import agreement
from tfdistill.teachers import options
from tfdistill.teachers import peer
from tfdistill.teachers import teacher as teacher_lib

_X, _Y = cases.data()


@pytest.fixture
def exchange(tmp_path):
    return tfdistill.Exchange(tmp_path / "exchange")


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


def test_the_versions_in_use_are_known_and_come_back(exchange):
    for group in (1, 2):
        cases.publish(exchange, cases.linear(group), group=group, step=7)
    before = cases.following(exchange, peers=(1, 2, 3))
    assert before.teachers.versions() == {1: -1, 2: -1, 3: -1}
    cases.load(before, 7, 7, -1)
    found = before.teachers.versions()
    assert found == {1: 7, 2: 7, 3: -1}
    # Meanwhile a peer has published another.
    cases.publish(exchange, cases.linear(5), group=1, step=9)
    after = cases.following(exchange, peers=(1, 2, 3))
    assert after.teachers.load_versions(found) == found
    np.testing.assert_array_equal(_outputs(after)[0], _outputs(before)[0])
    assert after.teachers.generation == 0
    # From here on it is followed as ever.
    cases.load(after, 9, 7, -1)


@pytest.mark.parametrize("damage", ["gone", "damaged"])
def test_a_version_that_cannot_be_read_is_left_out(exchange, damage, caplog):
    for group in (1, 2):
        cases.publish(exchange, cases.linear(group), group=group, step=7)
    path = exchange.version_path(1, 7)
    if damage == "gone":
        shutil.rmtree(path)
    else:
        with open(f"{path}/saved_model.pb", "r+b") as file:
            file.write(b"x")
    model = cases.following(exchange, peers=(1, 2))
    with caplog.at_level(logging.WARNING):
        found = model.teachers.load_versions({1: 7, 2: 7})
    assert found == {1: -1, 2: 7} == model.teachers.versions()
    assert "version 7 of the teacher group_1" in caplog.text
    cases.publish(exchange, cases.linear(3), group=1, step=8)
    cases.load(model, 8, 7)


def test_a_group_that_is_no_teacher_any_more_is_told(exchange, caplog):
    model = cases.following(exchange)
    assert model.teachers.load_versions({1: -1, 5: 10}) == {1: -1}
    assert "Groups [5] are no longer teachers" in caplog.text


def test_it_is_called_once_training_begins(exchange):
    cases.publish(exchange, cases.linear(1), step=7)
    teachers = cases.teacher_set(exchange)
    assert teachers.versions() == {1: -1}
    with pytest.raises(RuntimeError, match="on_train_begin"):
        teachers.load_versions({1: 7})
    found = []

    class Resume(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            found.append(teachers.load_versions({1: 7}))

    model = cases.codistill(cases.linear(0), teachers)
    # Beside a loader that reads already.
    loader = tfdistill.TeacherLoader(every_steps=10**9)
    logs = cases.fit(model, _X, _Y, callbacks=[loader, Resume()])
    assert found == [{1: 7}] and logs["distillation_weight"] == [1]


def test_another_graph_comes_back_too(exchange):
    cases.publish(exchange, cases.deep(1), step=7)
    model = cases.following(exchange, allow_other_graphs=True)
    assert model.teachers.load_versions({1: 7}) == {1: 7}
    np.testing.assert_allclose(
        _outputs(model)[0][0], cases.deep(1)(_X), rtol=1e-5
    )
    assert model.teachers.generation == 1


# ---- several workers, pretended by threads ----


_BOUNDED = options.TeacherOptions(max_staleness_secs=10, staleness_ramp_secs=10)


class _Sums:
    """Adds up what two workers say, as the collective does."""

    def __init__(self):
        self._barrier = threading.Barrier(2, timeout=30)
        self._given = []
        self.sizes = []

    def of(self, worker):
        def of_worker(values):
            self._given.append(values)
            self._barrier.wait()
            total = np.sum(self._given, axis=0)
            if self._barrier.wait() == 0:
                self._given = []
                self.sizes.append(len(total))
            self._barrier.wait()
            return total, np.zeros([2], np.int64)

        return of_worker


class _Teacher(teacher_lib.Teacher):
    """A place whose worker can read some versions, and not others."""

    needs_graph = False

    def __init__(self, exchange, name, group, readable):
        super().__init__(name, None, _BOUNDED)

        def read(version):
            if version.step not in readable:
                raise peer.RejectedError("it is not to be read here.")
            return []

        self.reader = peer.PeerReader(exchange, group, read=read, alone=False)


def _agreement(worker, teachers, sums):
    return agreement.Agreement(
        teachers, sums.of(worker), num_workers=2, is_chief=worker == 0
    )


def _run_both(work, *arguments):
    threads = [threading.Thread(target=work, args=a) for a in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


def test_the_chiefs_clock_says_how_old_a_version_is(exchange):
    cases.publish(exchange, cases.linear(1), step=7)
    sums, found = _Sums(), {}

    def work(worker, age_secs):
        teacher, now = _Teacher(exchange, "group_1", 1, {7}), [0.0]
        teacher._clock = lambda: now[0]
        teacher.reader.announce(7)
        teacher.reader.stage()
        teacher.swap()
        now[0] = age_secs
        if worker == 0:
            teacher.judge(None, None)
        _agreement(worker, [teacher], sums).exchange_news("it made no sense")
        found[worker] = teacher.share

    # The second worker was stopped for a while, or started later.
    _run_both(work, (0, 15.0), (1, 500.0))
    assert found == {0: 0.5, 1: 0.5}


def test_workers_take_the_versions_of_the_chief_that_all_can_read(exchange):
    for group, step in ((1, 7), (2, 7), (2, 8)):
        cases.publish(exchange, cases.linear(group), group=group, step=step)
    sums, found = _Sums(), {}

    def work(worker, wanted, readable):
        teachers = [
            _Teacher(exchange, name, group, readable)
            for name, group in (("group_1", 1), ("group_2", 2))
        ]
        decide = _agreement(worker, teachers, sums)
        first = decide.read_versions(wanted)
        second = decide.read_versions({"group_2": 8} if worker == 0 else {})
        found[worker] = [[s.name for s in taken] for taken in (first, second)]

    _run_both(
        work,
        (0, {"group_1": 7, "group_2": 7}, {7, 8}),
        # It asks for others, and can read but one.
        (1, {"group_1": 3}, {8}),
    )
    assert found == {0: [[], ["group_2"]], 1: [[], ["group_2"]]}
    assert sums.sizes == [2 * agreement.NUM_FIELDS] * 4


# ---- following peers ----


def test_the_newest_version_replaces_the_one_before(exchange):
    model = cases.following(exchange)
    np.testing.assert_array_equal(_outputs(model)[1], [[0] * 16])
    for step in (10, 11, 12):
        cases.publish(exchange, cases.linear(step), step=step)
        cases.load(model, step)
        outputs, weights = _outputs(model)
        expected = cases.linear(step)(_X)
        np.testing.assert_allclose(outputs[0], expected, rtol=1e-5)
        np.testing.assert_array_equal(weights, [[1] * 16])


def test_a_narrow_exchange_gives_rounded_values(exchange):
    peer = cases.linear(1)
    cases.publish(exchange, peer, variables_dtype="bfloat16")
    model = cases.following(exchange)
    cases.load(model, 10)
    for variable in peer.variables:
        half = tf.cast(variable.value, tf.bfloat16)
        variable.assign(tf.cast(half, tf.float32))
    outputs, _ = _outputs(model)
    np.testing.assert_allclose(outputs[0], peer(_X), rtol=1e-5)


@pytest.mark.parametrize("peers", [(1, 2, 3), (2,), (3, 1)])
def test_topologies_are_lists_of_peers(exchange, peers):
    for group in (1, 2, 3):
        cases.publish(exchange, cases.linear(group), group=group, step=group)
    model = cases.following(exchange, peers=peers)
    cases.load(model, *peers)
    outputs, _ = _outputs(model)
    assert len(outputs) == len(peers)
    for output, group in zip(outputs, peers, strict=True):
        np.testing.assert_allclose(output, cases.linear(group)(_X), rtol=1e-5)


def test_swaps_reach_every_replica(exchange, two_replicas):
    with two_replicas.scope():
        model = cases.codistill(cases.linear(0), cases.teacher_set(exchange))
    data = tf.data.Dataset.from_tensor_slices((_X, _Y)).batch(16)
    cases.prepare(model, data)
    for step in (10, 11):
        cases.publish(exchange, cases.linear(step), step=step)
        cases.load(model, step)

        @tf.function
        def ask():
            def in_replica():
                return model.teachers.predict(
                    tf.constant(_X),
                    step=tf.constant(20, tf.int64),
                    active=tf.constant(True),
                    like=tf.zeros([16, 3]),
                ).outputs[0][0]

            return two_replicas.run(in_replica)

        expected = cases.linear(step)(_X)
        for found in two_replicas.experimental_local_results(ask()):
            np.testing.assert_allclose(found, expected, rtol=1e-5)


# ---- peers with other graphs ----


def test_another_graph_is_refused_by_default(exchange, caplog):
    cases.publish(exchange, cases.deep(1))
    model = cases.following(exchange)
    with caplog.at_level(logging.WARNING):
        _settle(model)
    assert model.teachers.status()[0]["step"] == -1
    assert "allow_other_graphs=True" in cases.quarantined(model)[10]
    assert caplog.text.count("allow_other_graphs=True") == 1


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


def _mixed():
    keras.config.set_dtype_policy("mixed_bfloat16")
    student = cases.linear(1)
    keras.config.set_dtype_policy("float32")
    return student


@pytest.mark.parametrize(
    ("build", "dtype"),
    [
        (lambda: cases.linear(1), tf.float64),
        (lambda: cases.linear(1), tf.bfloat16),
        (_mixed, tf.float32),
    ],
    ids=["float64_inputs", "bfloat16_inputs", "mixed"],
)
def test_a_peer_of_another_precision(exchange, build, dtype):
    cases.publish(exchange, build(), spec=cases.input_spec(dtype=dtype))
    model = cases.following(exchange, allow_other_graphs=True)
    cases.load(model, 10)
    outputs, weights = _outputs(model)
    np.testing.assert_allclose(outputs[0], cases.linear(1)(_X), atol=0.05)
    assert outputs[0].dtype == np.float32
    assert weights.all()


def test_a_graph_that_cannot_be_loaded_leaves_the_teacher(
    exchange, monkeypatch
):
    """The files may be gone or changed by the time they are loaded."""
    model = cases.following(exchange, allow_other_graphs=True)
    cases.publish(exchange, cases.linear(10), step=10)
    cases.load(model, 10)

    def fail(path):
        raise OSError("no such file")

    with monkeypatch.context() as patch:
        patch.setattr(tf.saved_model, "load", fail)
        cases.publish(exchange, cases.deep(11), step=11)
        cases.refresh_until(model, lambda: cases.quarantined(model))
    assert "no such file" in cases.quarantined(model)[11]
    assert model.teachers.status()[0]["step"] == 10
    outputs, _ = _outputs(model)
    np.testing.assert_allclose(outputs[0], cases.linear(10)(_X), rtol=1e-5)
    assert model.teachers.generation == 0


def test_a_graph_with_other_variables_than_its_manifest_says(exchange):
    model = cases.following(exchange, allow_other_graphs=True)
    cases.publish(exchange, cases.deep(1), variables={})
    _settle(model)
    assert "must hold the 0 variables" in cases.quarantined(model)[10]


# ---- quarantine ----


def _truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip(path):
    content = bytearray(path.read_bytes())
    is_manifest = path.name == manifest.FILE_NAME
    # A manifest's own text has no checksum: here it is no JSON any more.
    content[0 if is_manifest else len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def _files(exchange, step=10):
    """The names of a version's files."""
    root = pathlib.Path(exchange.version_path(1, step))
    return sorted(
        str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()
    )


@pytest.mark.parametrize("damage", [_truncate, _flip, pathlib.Path.unlink])
def test_no_damaged_file_becomes_a_teacher(exchange, damage):
    cases.publish(exchange, cases.linear(1), step=1)
    names = _files(exchange, 1)
    assert len(names) == 5
    model = cases.following(exchange)
    cases.load(model, 1)
    for step, name in enumerate(names, 10):
        # An exchange of its own each time: pruning must not interfere.
        cases.publish(exchange, cases.linear(step), step=step)
        path = pathlib.Path(exchange.version_path(1, step)) / name
        damage(path)
        if name == manifest.FILE_NAME and damage is not _flip:
            continue  # Not a version at all; see the last assertion.
        reader = model.teachers._teachers[0].reader
        reader.announce(step)
        cases.refresh_until(model, lambda s=step: s in cases.quarantined(model))
        reason = cases.quarantined(model)[step]
        assert name in reason or "manifest" in reason
    assert model.teachers.status()[0]["step"] == 1
    outputs, _ = _outputs(model)
    np.testing.assert_allclose(outputs[0], cases.linear(1)(_X), rtol=1e-5)
    cases.publish(exchange, cases.linear(3), step=99)
    cases.load(model, 99)


@pytest.mark.parametrize("outputs", [None, [], {"outputs": 3}, "text"])
def test_a_manifest_that_makes_no_sense_is_refused(exchange, outputs):
    cases.publish(exchange, cases.linear(1), outputs=outputs)
    model = cases.following(exchange)
    _settle(model)
    assert "outputs" in cases.quarantined(model)[10]


def test_other_variables_are_refused(exchange):
    """The manifest lies about the graph; the bundle has other shapes."""
    model = cases.following(exchange)
    own = model.graph.fingerprint
    cases.publish(exchange, cases.deep(1), graph_fingerprint=own)
    _settle(model)
    assert "must be float32 [4, 3]" in cases.quarantined(model)[10]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused(exchange, value):
    peer = cases.linear(1)
    peer.variables[1].assign([0.0, value, 0.0])
    cases.publish(exchange, peer, finite=False)
    model = cases.following(exchange)
    _settle(model)
    assert "NaN or infinite" in cases.quarantined(model)[10]
    assert model.teachers.status()[0]["step"] == -1


def _overflowing():
    """Finite values whose outputs for `_FAR` are infinite."""
    peer = cases.linear(1)
    for variable in peer.variables:
        variable.assign(tf.fill(variable.shape, 3e38))
    return peer


@pytest.mark.parametrize("replicas", [1, 2])
def test_outputs_that_are_not_finite_are_dropped(
    exchange, caplog, replicas, request
):
    strategy = (
        request.getfixturevalue("two_replicas")
        if replicas == 2
        else tf.distribute.get_strategy()
    )
    with strategy.scope():
        teachers = cases.teacher_set(exchange, max_bad_batches=3)
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
    cases.fit(model, data)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            model.teachers.refresh()
    assert caplog.text.count("3 batches in a row") == 1
    assert "3 batches in a row" in cases.quarantined(model)[10]
    assert model.teachers.status()[0]["step"] == -1
    # A good version takes its place, and is not charged with the past.
    cases.publish(exchange, cases.linear(2), step=11)
    cases.load(model, 11)
    model.teachers.refresh()
    assert model.teachers.status()[0]["step"] == 11
    assert cases.fit(model, data)["distillation_weight"] == [1]


def test_a_version_pruned_while_it_is_read_is_passed_over(exchange):
    model = cases.following(exchange)
    cases.publish(exchange, cases.linear(1), step=10)
    reader = model.teachers._teachers[0].reader
    reader.announce(9)
    cases.load(model, 10)
    assert "gone" in cases.quarantined(model)[9]


# ---- fixed teachers ----


def test_fixed_teachers_of_any_making(tmp_path, exchange):
    ours = cases.publish(exchange, cases.deep(1)).path
    cases.deep(2).export(str(tmp_path / "keras"), verbose=False)
    module = tf.Module()
    module.weights = tf.Variable(tf.ones([4, 3]))
    module.call = tf.function(
        lambda x: {"logits": x @ module.weights},
        input_signature=[cases.input_spec()],
    )
    tf.saved_model.save(module, str(tmp_path / "tf"), signatures=module.call)
    paths = [ours, tmp_path / "keras", str(tmp_path / "tf")]
    model = cases.following(peers=(), saved_models=paths)
    outputs, weights = _outputs(model)
    expected = [
        cases.deep(1)(_X),
        cases.deep(2)(_X),
        _X @ np.ones([4, 3], "float32"),
    ]
    for found, value in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-5)
    assert weights.all()
    assert [s["name"] for s in model.teachers.status()] == [
        str(p) for p in paths
    ]
    logs = cases.fit(model, _X, _Y, callbacks=[])
    assert logs["distillation_weight"] == [1]


def test_a_fixed_teacher_beside_a_peer(tmp_path, exchange):
    cases.deep(2).export(str(tmp_path / "fixed"), verbose=False)
    model = cases.following(
        exchange, saved_models=[tmp_path / "fixed"], weights=[1.0, 2.0]
    )
    _, weights = _outputs(model)
    np.testing.assert_array_equal(weights, [[0] * 16, [2] * 16])
    cases.publish(exchange, cases.linear(1))
    cases.load(model, 10, -1)
    outputs, weights = _outputs(model)
    np.testing.assert_array_equal(weights, [[1] * 16, [2] * 16])
    np.testing.assert_allclose(outputs[0], cases.linear(1)(_X), rtol=1e-5)


def test_a_fixed_teacher_on_two_replicas(tmp_path, two_replicas):
    cases.deep(2).export(str(tmp_path), verbose=False)
    results = []
    for strategy in (tf.distribute.get_strategy(), two_replicas):
        with strategy.scope():
            teachers = tfdistill.TeacherSet(saved_models=[tmp_path])
            model = cases.codistill(cases.linear(0), teachers)
        data = tf.data.Dataset.from_tensor_slices((_X, _Y)).batch(6)
        logs = cases.fit(model, data, epochs=2, callbacks=[])
        results.append((logs, [v.numpy() for v in model.student.variables]))
    (one_logs, one), (two_logs, two) = results
    np.testing.assert_allclose(one_logs["loss"], two_logs["loss"], rtol=1e-5)
    for a, b in zip(one, two, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_fixed_teacher_that_turns_bad_is_dropped(tmp_path, caplog):
    _overflowing().export(str(tmp_path), verbose=False)
    model = cases.following(peers=(), saved_models=[tmp_path])
    loader = tfdistill.TeacherLoader(every_steps=1)
    with caplog.at_level(logging.WARNING):
        cases.fit(model, _FAR, _Y, epochs=5, callbacks=[loader])
    assert caplog.text.count("Dropped the teacher") == 1
    status = model.teachers.status()[0]
    assert (status["health"], status["num_dropped"]) == ("dropped", 1)
    np.testing.assert_array_equal(_outputs(model, _FAR)[1], [[0] * 16])


def test_a_fixed_teacher_that_does_not_fit_is_an_error(tmp_path):
    cases.linear(1, classes=9).export(str(tmp_path), verbose=False)
    with pytest.raises(ValueError, match=r"\(None, 3\); found \(None, 9\)"):
        cases.following(peers=(), saved_models=[tmp_path])


# ---- mistakes ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"peers": (1, 1)}, r"each once; received \(1, 1\)"),
        ({"peers": (-1,)}, ">= 0"),
        ({"peers": ("1",)}, "group indices"),
        ({"weights": [1.0, 2.0]}, "for each of 1 teachers"),
        ({"weights": [-1.0]}, r"\[-1.0\]"),
        ({"weights": [float("nan")]}, "finite"),
        ({"weights": [0.0]}, "not all of them 0"),
        ({"max_staleness_steps": -1}, "max_staleness_steps.*-1"),
        ({"max_bad_batches": 0}, "max_bad_batches.*>= 1; received 0"),
        ({"poll_secs": 0.0}, "poll_secs"),
        ({"saved_models": "model/1"}, "list of directories.*'model/1'"),
        ({"poll_secs": float("nan")}, "poll_secs"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(exchange, arguments, message):
    with pytest.raises(ValueError, match=message):
        tfdistill.TeacherSet(exchange, **{"peers": (1,), **arguments})


def test_one_set_serves_one_student(exchange):
    teachers = cases.teacher_set(exchange)
    cases.prepare(cases.codistill(cases.linear(0), teachers), _X, _Y)
    other = cases.codistill(cases.linear(0), teachers)
    with pytest.raises(RuntimeError, match="serves one student"):
        cases.prepare(other, _X, _Y)


def test_nobody_to_follow_needs_no_thread():
    teachers = tfdistill.TeacherSet()
    assert len(teachers) == 0
    assert not teachers.follows_peers
    teachers.start()
    teachers.stop()
    assert teachers.status() == []
