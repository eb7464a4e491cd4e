"""Versions that are put in place before training, and those that cannot be."""

import logging
import shutil
import threading

import codistillation_cases as cases
import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tfdistill import agreement
from tfdistill import peer_reader
from tfdistill import staleness
from tfdistill import teacher_health

_X, _Y = cases.data()


@pytest.fixture
def exchange(tmp_path):
    return tfdistill.Exchange(tmp_path / "exchange")


def _model(exchange, **kwargs):
    model = cases.codistill(
        cases.linear(0), cases.teacher_set(exchange, **kwargs)
    )
    cases.prepare(model, _X, _Y)
    return model


def _predictions(model, x=_X):
    soft = model.teachers.predict(
        tf.constant(x),
        step=tf.constant(20, tf.int64),
        active=tf.constant(True),
        like=model.student(x),
    )
    return [output.numpy() for output in soft.outputs[0]]


def test_the_versions_in_use_are_known_and_come_back(exchange):
    for group in (1, 2):
        cases.publish(exchange, cases.linear(group), group=group, step=7)
    before = _model(exchange, peers=(1, 2, 3))
    assert before.teachers.versions() == {1: -1, 2: -1, 3: -1}
    cases.load(before, 7, 7, -1)
    found = before.teachers.versions()
    assert found == {1: 7, 2: 7, 3: -1}
    # Meanwhile a peer has published another.
    cases.publish(exchange, cases.linear(5), group=1, step=9)
    after = _model(exchange, peers=(1, 2, 3))
    assert after.teachers.load_versions(found) == found
    for ours, theirs in zip(
        _predictions(after), _predictions(before), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
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
    model = _model(exchange, peers=(1, 2))
    with caplog.at_level(logging.WARNING):
        found = model.teachers.load_versions({1: 7, 2: 7})
    assert found == {1: -1, 2: 7} == model.teachers.versions()
    assert "version 7 of the teacher group_1" in caplog.text
    cases.publish(exchange, cases.linear(3), group=1, step=8)
    cases.load(model, 8, 7)


def test_a_group_that_is_no_teacher_any_more_is_told(exchange, caplog):
    model = _model(exchange)
    assert model.teachers.load_versions({1: -1, 5: 10}) == {1: -1}
    assert "Groups [5] are no teachers" in caplog.text


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
    model = _model(exchange, allow_other_graphs=True)
    assert model.teachers.load_versions({1: 7}) == {1: 7}
    np.testing.assert_allclose(
        _predictions(model)[0], cases.deep(1)(_X), rtol=1e-5
    )
    assert model.teachers.generation == 1


# ---- several workers, pretended by threads ----


class _Sums:
    """Adds up what two workers say, as the collective does."""

    def __init__(self):
        self._barrier = threading.Barrier(2, timeout=30)
        self._given = []
        self.sizes = []

    def of(self, worker):
        outer = self

        class OfWorker:
            def sum(self, values):
                outer._given.append(values)
                outer._barrier.wait()
                total = np.sum(outer._given, axis=0)
                if outer._barrier.wait() == 0:
                    outer._given = []
                    outer.sizes.append(len(total))
                outer._barrier.wait()
                return total, np.zeros([len(total) // 4], np.int64)

        return OfWorker()


class _Slot:
    """A place whose worker can read some versions, and not others."""

    def __init__(self, exchange, name, group, readable):
        self.name, self.needs_graph = name, False
        self.health = teacher_health.TeacherHealth(name)

        def read(version):
            if version.step not in readable:
                raise peer_reader.RejectedError("it is not to be read here.")
            return version.step

        self.reader = peer_reader.PeerReader(
            exchange, group, read=read, alone=False
        )


def _run_both(work, *arguments):
    threads = [threading.Thread(target=work, args=a) for a in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


def test_the_chiefs_clock_says_how_old_a_version_is(exchange, monkeypatch):
    monkeypatch.setattr("tfdistill.chief_only.num_workers", lambda _: 2)
    sums, found = _Sums(), {}

    def work(worker, age_secs):
        slot = _Slot(exchange, "group_1", 1, {})
        now = [0.0]
        slot.health.clock = lambda: now[0]
        slot.health.bounds = staleness.Bounds(max_secs=10, ramp_secs=10)
        slot.health.swapped(7, num_bytes=1)
        now[0] = age_secs
        decisions = agreement.Decisions(
            tf.distribute.get_strategy(), [slot], sums.of(worker)
        )
        decisions._proposes = worker == 0
        decisions.drop_bad("it made no sense")
        found[worker] = slot.health.share

    # The second worker was stopped for a while, or started later.
    _run_both(work, (0, 15.0), (1, 500.0))
    assert found == {0: 0.5, 1: 0.5}


def test_workers_take_the_versions_of_the_chief_that_all_can_read(
    exchange, monkeypatch
):
    for group, step in ((1, 7), (2, 7), (2, 8)):
        cases.publish(exchange, cases.linear(group), group=group, step=step)
    monkeypatch.setattr("tfdistill.chief_only.num_workers", lambda _: 2)
    sums, found = _Sums(), {}

    def work(worker, wanted, readable):
        slots = [
            _Slot(exchange, name, group, readable)
            for name, group in (("group_1", 1), ("group_2", 2))
        ]
        decisions = agreement.Decisions(
            tf.distribute.get_strategy(), slots, sums.of(worker)
        )
        decisions._proposes = worker == 0
        first = decisions.read(wanted)
        second = decisions.read({"group_2": 8} if worker == 0 else {})
        found[worker] = [[s.name for s in taken] for taken in (first, second)]

    _run_both(
        work,
        (0, {"group_1": 7, "group_2": 7}, {7, 8}),
        # It asks for others, and can read but one.
        (1, {"group_1": 3}, {8}),
    )
    assert found == {0: [[], ["group_2"]], 1: [[], ["group_2"]]}
    assert sums.sizes == [8] * 4


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
