"""Teachers of a parameter-server group, fed by versions really published."""

import dataclasses
import functools
import threading

import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as codistillation_cases
from tests.cases import object_store
from tests.cases import servers as cases
from tfdistill import teachers as kinds
from tfdistill.cluster import replicas
from tfdistill.exports import key_frames
from tfdistill.exports import student_graph
from tfdistill.teachers import on_servers
from tfdistill.teachers import staleness
from tfdistill.teachers import teacher as teacher_lib
from tfdistill.teachers import teacher_list
from tfdistill.training import steps

SPEC = {
    "features": tf.TensorSpec([None, cases.NUM_FEATURES], tf.float32),
    "ids": tf.TensorSpec([None, len(cases.SIZES)], tf.int64),
}


def _made(seed):
    student = cases.student(seed=seed)
    codistillation_cases.randomize(student, seed)
    return student


# Those that no test changes, and the graph of a student, are traced once.
_peer = functools.cache(_made)


@functools.cache
def _graph():
    return student_graph.StudentGraph(cases.student(), SPEC)


@pytest.fixture
def on_server_group(monkeypatch):
    """Every student is one of a parameter-server group, wherever it runs."""
    monkeypatch.setattr(replicas, "on_servers", lambda strategy: True)


def _attach(teachers):
    strategy = tf.distribute.get_strategy()
    teachers.attach(_graph(), strategy, steps.LastExecution())


class _Group:
    """A student with one teacher, and the peer that it learns from."""

    def __init__(self, directory, **kwargs):
        self.exchange = tfdistill.Exchange(directory)
        self.x, _ = cases.data()
        self.teachers = teacher_list.TeacherList(
            codistillation_cases.peers(self.exchange, **kwargs),
            tfdistill.Cluster(),
        )
        _attach(self.teachers)
        (self.teacher,), self.remote = self.teachers, self.teachers.remote
        self.refresh = self.teachers.refresh
        self._ask = tf.function(self._execute, autograph=False)

    def publish(self, student, step, **kwargs):
        codistillation_cases.publish(
            self.exchange, student, step=step, spec=SPEC, **kwargs
        )

    def stage(self):
        self.teacher.follower.look()
        self.teacher.follower.stage()

    def take(self, student, step):
        self.publish(student, step)
        self.stage()
        assert self.refresh() == ["group_1"]

    def _execute(self, arguments, step, x):
        self.remote.on_worker(arguments)
        soft = self.teachers.ask(
            teacher_lib.Batch(inputs=x, outputs=tf.zeros([24, 1]), step=step),
            active=tf.constant(True),
        )
        logs = {
            **steps.hidden("taught_rows", [soft.taught_rows]),
            **steps.hidden("versions", [soft.steps]),
        }
        return soft.outputs[0][0], soft.weights, logs

    def ask(self, arguments, *, step=100):
        """One execution: predictions, and each row's weight."""
        step = tf.constant(step, tf.int64)
        *found, logs = self._ask(arguments, step, self.x)
        self.teachers._student.last.taken_from(logs)
        return [value.numpy() for value in found]


@pytest.fixture
def group(tmp_path, on_server_group):
    return _Group(tmp_path)


@pytest.mark.deep
def test_a_version_comes_from_an_object_store(
    tmp_path, monkeypatch, on_server_group
):
    """Which TensorFlow's operations, on whatever task, cannot read."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    peer = _peer(3)
    with object_store.serve() as s3:
        group = _Group(f"{s3.url}/hub")
        group.take(peer, 10)
    found, _ = group.ask(group.remote.arguments())
    np.testing.assert_allclose(found, peer(group.x), rtol=1e-5)
    # But for what AutoGraph wrote.
    assert not list(tmp_path.glob("*/"))


def test_a_version_is_read_beside_the_one_in_use(group):
    first, second = _peer(3), _peer(4)
    group.take(first, 10)
    before = group.remote.arguments()
    np.testing.assert_array_equal(before, [[10, 1, np.inf, 1]])
    outputs, weights = group.ask(before)
    np.testing.assert_allclose(outputs, first(group.x), rtol=1e-5)
    assert (weights == 1).all()
    group.publish(second, 20)
    group.remote.note()
    group.stage()
    # It is there, and those who were sent out before do not see it.
    np.testing.assert_allclose(group.ask(before)[0], first(group.x), rtol=1e-5)
    assert group.refresh() == ["group_1"]
    after = group.remote.arguments()
    np.testing.assert_array_equal(after, [[20, 1, np.inf, 2]])
    for arguments, peer in ((after, second), (before, first), (after, second)):
        outputs = group.ask(arguments)[0]
        np.testing.assert_allclose(outputs, peer(group.x), rtol=1e-5)
    assert group._ask.experimental_get_tracing_count() == 1


@pytest.mark.deep
@pytest.mark.parametrize("dtype", ["int8", None])
def test_deltas_are_put_over_what_is_held(group, monkeypatch, dtype):
    peer, frames = _made(3), key_frames.KeyFrames(3, None)
    held = cases.student()
    wholes, read = [], on_servers.ServerCopy.read

    def counted(self, version, expected):
        wholes.append(version.step)
        return read(self, version, expected)

    monkeypatch.setattr(on_servers.ServerCopy, "read", counted)
    rng = np.random.default_rng(0)
    # The key frames are 1, 4, 7 and 10; of 5 to 10 this group hears nothing.
    for step in range(1, 13):
        for variable, rounded in zip(
            peer.variables, held.variables, strict=True
        ):
            # Few rows, and much.
            changed = rng.integers(0, variable.shape[0], 2)
            value = variable.numpy()
            value[changed] += rng.normal(size=value[changed].shape)
            variable.assign(value)
            if dtype:
                value = codistillation_cases.rounded(
                    value, dtype, by_row=variable.path.startswith("table")
                )
            rounded.assign(value)
        group.publish(peer, step, frames=frames, variables_dtype=dtype)
        if 5 <= step <= 10:
            continue
        group.stage()
        assert group.refresh() == ["group_1"]
        arguments = group.remote.arguments()
        group.remote.note()
        found = group.ask(arguments)[0]
        np.testing.assert_allclose(found, held(group.x), rtol=1e-5, atol=1e-6)
    # Who follows takes the next frame by its delta.
    assert wholes == [1, 10]


def test_a_half_is_filled_when_nobody_uses_it(group, monkeypatch):
    monkeypatch.setattr(on_servers, "_FREE_POLL_SECS", 0.001)
    group.take(_peer(3), 10)
    group.remote.arguments()
    group.publish(_peer(4), 20)
    group.stage()
    in_flight = [group.remote.arguments() for _ in range(2)]
    assert group.refresh()
    group.publish(_peer(5), 30)
    group.teacher.follower.look()
    reading = threading.Thread(target=group.teacher.follower.stage)
    reading.start()
    try:
        # Three executions went out before the swap.
        for _ in range(3):
            reading.join(0.05)
            assert reading.is_alive() and not group.refresh()
            group.remote.note()
    finally:
        group.remote._num_done = group.remote._num_scheduled
        reading.join(30)
    assert len(in_flight) == 2 and group.refresh() == ["group_1"]


def test_waiting_for_a_half_has_an_end(group, monkeypatch):
    monkeypatch.setattr(on_servers, "_FREE_TIMEOUT_SECS", 0.01)
    group.remote.arguments()
    group.remote.swapped()
    with pytest.raises(RuntimeError, match="didn't end within 0.01"):
        group.remote._wait_until_free()
    group.remote.note()
    group.remote._wait_until_free()


def test_another_group_takes_a_place(tmp_path, on_server_group):
    group = _Group(tmp_path, peers=(1, 2), at_most=1)
    group.take(_peer(3), 10)
    before = group.remote.arguments()
    group.teacher.drop("for some reason")
    group.teacher.places.best = lambda **kwargs: 2
    group.refresh()
    # Until a version of it is read, the place teaches nothing.
    assert group.teacher.label == "group_2"
    assert not group.ask(group.remote.arguments())[1].any()
    del group.teacher.places.best
    other = _peer(4)
    group.publish(other, 12, group=2)
    group.remote.note()
    group.stage()
    assert group.refresh() == ["group_2"]
    outputs, weights = group.ask(group.remote.arguments())
    np.testing.assert_allclose(outputs, other(group.x), rtol=1e-5)
    assert weights.all()
    # What is in flight still asks the group before.
    np.testing.assert_allclose(
        group.ask(before)[0], _peer(3)(group.x), rtol=1e-5
    )
    assert group._ask.experimental_get_tracing_count() == 1


def _overflowing():
    """Finite weights whose predictions are not."""
    student = _made(3)
    kernel = student.layers[-1].kernel
    kernel.assign(tf.fill(kernel.shape, 3e38))
    return student


def test_a_teacher_that_makes_no_sense_is_dropped(group):
    group.take(_overflowing(), 10)
    arguments = group.remote.arguments()
    for _ in range(3):
        assert group.teacher.standing().share
        assert not group.ask(arguments)[1].all()
        for _ in range(2):  # An execution is counted once.
            group.refresh()
    assert group.teacher.standing().health == "dropped"
    assert "3 refreshes in a row" in group.teacher.follower.rejected[10]
    np.testing.assert_array_equal(group.remote.arguments()[:, 1], [0])
    # Its successor starts with a clean record.
    group.take(_peer(4), 20)
    # What is in flight still says what the one before answered.
    for _ in range(3):
        group.ask(arguments)
        group.refresh()
    assert group.ask(group.remote.arguments())[1].all()
    assert group.teacher.standing().step == 20


@pytest.mark.parametrize("what", ["table", "dense"])
def test_a_version_with_nan_is_refused(group, what):
    peer = _made(3)
    part = peer.get_layer("table") if what == "table" else peer.layers[-1]
    variable = part.variables[0]
    values = variable.numpy()
    values[1, 0] = np.nan
    variable.assign(values)
    group.publish(peer, 10, finite=False)
    group.stage()
    assert not group.refresh()
    assert "NaN or infinite" in group.teacher.follower.rejected[10]


def test_a_version_that_is_too_old_is_not_obeyed(tmp_path, on_server_group):
    group = _Group(tmp_path, max_staleness_steps=50)
    group.take(_peer(3), 10)
    arguments = group.remote.arguments()
    assert group.ask(arguments, step=60)[1].all()
    assert not group.ask(arguments, step=61)[1].any()
    # What the coordinator drops has no weight from the next execution on.
    group.teacher.drop("for some reason")
    group.remote.show()
    assert not group.ask(group.remote.arguments(), step=60)[1].any()


# ---- the whole of it, on a pretended group ----


def _model(directory):
    teachers = codistillation_cases.peers(tfdistill.Exchange(directory))
    return cases.model(teachers=teachers, distillation_weight=1.0)


def test_a_group_goes_on_with_the_version_that_it_had(tmp_path, monkeypatch):
    cases.pretend(monkeypatch)
    model = _model(tmp_path)
    model.trainer.build(cases.batches().element_spec)
    assert model.before_tracing() is model.teachers.remote
    peer = _peer(3)
    for step, student in ((10, peer), (11, _peer(4))):
        codistillation_cases.publish(
            tfdistill.Exchange(tmp_path), student, step=step, spec=SPEC
        )
    silence = dataclasses.astuple(staleness.Silence())
    state = {"step": 10, "now": None, "silence": silence}
    model.teachers.restore({"group_1": state})
    arguments = model.teachers.remote.arguments()
    np.testing.assert_array_equal(arguments[:, :2], [[10, 1]])
    (teacher,) = model.teachers

    @tf.function
    def ask():
        model.teachers.remote.on_worker(arguments)
        return teacher._copy.infer(cases.data()[0])[0]

    np.testing.assert_allclose(ask(), peer(cases.data()[0]), rtol=1e-5)


def test_a_version_is_tried_before_it_is_obeyed(tmp_path, on_server_group):
    """Out of the half that is not in use, while the other one is."""
    good = _peer(3)
    group = _Group(tmp_path, canary=(cases.data()[0], None))
    group.take(good, 10)
    group.publish(_overflowing(), 20)
    group.remote.note()
    group.stage()
    assert not group.refresh()
    assert "on the canary batch" in group.teacher.follower.rejected[20]
    outputs, _ = group.ask(group.remote.arguments())
    np.testing.assert_allclose(outputs, good(group.x), rtol=1e-5)
    on_trial = group.teacher._copy._on_trial
    assert on_trial.experimental_get_tracing_count() == 1


@pytest.mark.parametrize(
    "teacher",
    [
        lambda: kinds.FixedTeacher("a/saved_model"),
        lambda: kinds.Peers(
            tfdistill.Exchange("x"), peers=[1], allow_other_graphs=True
        ),
    ],
)
def test_kinds_that_cannot_run_on_servers_say_so(monkeypatch, teacher):
    cases.pretend(monkeypatch)
    teachers = teacher_list.TeacherList(teacher(), tfdistill.Cluster())
    with pytest.raises(ValueError, match="arameter.server"):
        _attach(teachers)
