"""Exports and refreshes between steps, alone and beside Keras' callbacks."""

import contextlib
import logging
import os
import resource
import threading
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tests.cases import runs
from tfdistill.cluster import replicas
from tfdistill.cluster import strategy as strategy_lib
from tfdistill.exchange import claim
from tfdistill.exports import promotion
from tfdistill.observe import run_log
from tfdistill.system import background
from tfdistill.training import steps

_X, _Y = cases.data()
_WAIT_SECS = 60.0
_deep = pytest.mark.deep


@pytest.fixture
def exchange(tmp_path):
    return tfdistill.Exchange(
        tmp_path / "exchange", max_to_keep=100, min_keep_secs=0.0
    )


def test_a_launched_run_needs_to_say_nothing(run_dir):
    found = tfdistill.callbacks.defaults(every_steps=5)
    model = cases.codistill(cases.linear())
    model.fit(_X, _Y, verbose=0, callbacks=found)
    assert list((run_dir / "group_0" / "backup").iterdir())
    assert tfdistill.Exchange(run_dir / "exchange").steps(0) == [1]


class _Load(keras.callbacks.Callback):
    """Waits until the newest version of the other group teaches."""

    def on_train_batch_end(self, batch, logs=None):
        cases.load(self.model, 1)


def test_trainings_of_one_process_are_kept_apart(run_dir, monkeypatch):
    """No version of an earlier one teaches, and no file is overwritten."""
    monkeypatch.setenv("TFDISTILL_NUM_GROUPS", "2")
    place, loss = run_dir / "exchange", tfdistill.losses.SoftTargetCrossEntropy
    cases.publish(tfdistill.Exchange(place), cases.linear(1), step=1)

    def fit(model, *more):
        held_out = tfdistill.callbacks.HeldOutPredictions("day", (_X, _Y))
        found = tfdistill.callbacks.defaults(every_steps=1)
        found.append(tfdistill.callbacks.WaitForGroups(limit_secs=0.0))
        cases.fit(model, _X, _Y, callbacks=[*found, *more, held_out])
        (status,) = model.teachers.status()
        return status["step"]

    # As of two folds; the second one's model is then trained further, and
    # compiled and trained again.
    assert fit(cases.codistill(cases.linear(0), cases.peers()), _Load()) == 1
    model = cases.codistill(cases.linear(0), cases.peers())
    assert fit(model) == -1
    second = tfdistill.Exchange(place / "fit_2")
    cases.publish(second, cases.linear(1), step=1)
    assert fit(model, _Load()) == 1
    assert second.steps(0) == [1, 2]
    model.compile("sgd", model.loss, distillation_loss=loss())
    assert fit(model) == -1
    _, newest = promotion.choose(run_dir, group=0)
    assert newest.path == f"{place}/fit_3/group_0/1"

    group_dir = run_dir / "group_0"
    found = [
        (line.get("fit"), line["step"], line.get("exchange"))
        for line in runs.records(group_dir, "end")
    ]
    rooms = [None, "fit_2", "fit_2", "fit_3"]
    numbers, last = [None, 2, 3, 4], [1, 1, 2, 1]
    assert found == list(zip(numbers, last, rooms, strict=True))
    markers = {path.name for path in group_dir.glob("started*")}
    assert markers == {"started", "started_2", "started_3"}
    card = promotion.card_text(run_dir, newest, name="served")
    assert '"exchange": "fit_3"' in card
    for file, names in {
        "held_out/**/day.npz": {"held_out", "fit_2", "fit_3", "fit_4"},
        "tensorboard/**/*.tfevents*": {"tensorboard", "fit_2", "fit_3"},
    }.items():
        assert {path.parent.name for path in group_dir.glob(file)} == names


def _exporter(exchange, every_steps=1, *, pause_secs=None, **kwargs):
    exporter = cases.exporter(exchange, every_steps, **kwargs)
    if pause_secs is not None:
        exporter._pause = background.Backoff(
            first_secs=pause_secs, longest_secs=pause_secs
        )
    return exporter


class _Waiting(keras.callbacks.Callback):
    """Gives the writing thread its time after each step."""

    def __init__(self, exporter):
        super().__init__()
        self._exporter = exporter

    def on_train_batch_end(self, batch, logs=None):
        # Idle again, so that the next export is not skipped.
        assert self._exporter._worker.wait_idle(_WAIT_SECS)


def _train(model, exporter, *, epochs=1, batch_size=4, more=()):
    return cases.fit(
        model,
        _X,
        _Y,
        epochs=epochs,
        batch_size=batch_size,
        callbacks=[exporter, _Waiting(exporter), *more],
    )


# ---- exporter ----


def test_versions_are_steps_and_hold_what_the_student_was(exchange):
    model = cases.codistill(cases.deep(0))
    seen = {}

    class Notes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            step = int(model.optimizer.iterations)
            seen[step] = [v.numpy() for v in model.student.variables]

    exporter = _exporter(exchange, every_steps=2)
    _train(model, exporter, epochs=2, more=[Notes()])
    assert exchange.steps(0) == [2, 4, 6, 8]
    assert (exporter.totals["published"], exporter.totals["failed"]) == (4, 0)
    for step in exchange.steps(0):
        version = exchange.open(0, step)
        exchange.verify(version)
        loaded = tf.saved_model.load(version.path)
        found = [v.numpy() for v in loaded.model_variables]
        for value, expected in zip(found, seen[step], strict=True):
            np.testing.assert_array_equal(value, expected)


def test_the_last_step_is_published_and_its_manifest_describes_it(exchange):
    model = cases.codistill(cases.linear(0))
    _train(model, _exporter(exchange, 1000, variables_dtype="bfloat16"))
    assert exchange.steps(0) == [4]
    found = exchange.latest(0).manifest
    assert found.graph_fingerprint == model.graph.fingerprint
    assert found.inputs == {"inputs": {"shape": [None, 4], "dtype": "float32"}}
    assert found.outputs["outputs"]["shape"] == [None, 3]
    assert [v["dtype"] for v in found.variables.values()] == ["bfloat16"] * 2
    assert {"tensorflow", "keras", "tfdistill"} <= set(found.libraries)


@pytest.mark.parametrize(
    ("group", "mixes", "arguments", "first"),
    [
        pytest.param(0, False, {}, 4, marks=_deep),
        pytest.param(2, False, {}, 2, marks=_deep),
        (0, True, {"offset_steps": 1}, 1),
    ],
)
def test_groups_take_turns_to_export(
    group, mixes, arguments, first, tmp_path, monkeypatch
):
    monkeypatch.setenv("TFDISTILL_NUM_GROUPS", "4")
    monkeypatch.setenv("TFDISTILL_EXCHANGE", str(tmp_path))
    exchange = tfdistill.Exchange(tmp_path, max_to_keep=9, min_keep_secs=0)
    exporter = cases.exporter(exchange, 4, group=group, **arguments)
    mixer = steps.Mixer() if mixes else keras.callbacks.Callback()
    model = cases.codistill(cases.linear())
    cases.fit(
        model,
        *cases.data(11),
        batch_size=1,
        callbacks=[exporter, _Waiting(exporter), mixer],
    )
    # And the last step.
    expected = {*range(first, 12, 4), 11}
    assert exchange.steps(group) == sorted(expected)
    assert exchange.latest(group).manifest.extras["every_steps"] == 4


@pytest.fixture
def steps_of_a_tenth(monkeypatch):
    """Lets the exporter's clock follow its steps, and writes take no time."""

    def make(exchange, group=0):
        found = cases.exporter(exchange, "auto", group=group)
        clock = types.SimpleNamespace(monotonic=lambda: found.step / 10)
        monkeypatch.setattr("tfdistill.callbacks.time", clock)
        found.writes = types.SimpleNamespace(
            last_secs=0.01, measured=contextlib.nullcontext
        )
        return found

    return make


@pytest.mark.parametrize(
    ("hears_secs", "expected"),
    [
        pytest.param(None, [100, 200, 300, 320], marks=_deep),
        # One and a half times as long; half or twice as many steps at most.
        (4.0, [100, 160, 220, 280, 320]),
        pytest.param(-1.0, [100, 200, 300, 320], marks=_deep),
        pytest.param(20.0, [100, 300, 320], marks=_deep),
        pytest.param(
            0.5, [100, 150, 175, *range(195, 320, 20), 320], marks=_deep
        ),
    ],
)
def test_the_interval_follows_what_the_others_hear(
    exchange, steps_of_a_tenth, hears_secs, expected
):
    extras = {} if hears_secs is None else {"hears_secs": hears_secs}
    cases.publish(exchange, cases.linear(1), step=1, extras=extras)
    model = cases.following(exchange)
    cases.load(model, 1)
    (peer,) = model.teachers
    peer.follower.read_secs = 0.0
    exporter = steps_of_a_tenth(exchange)
    _train(model, exporter, epochs=20, batch_size=1, more=[cases.never()])
    assert exchange.steps(0) == expected
    found = [exchange.open(0, s).manifest.extras for s in expected]
    assert [each["versions"] for each in found] == [*range(len(found))]
    assert found[0]["every_steps"] == expected[1] - expected[0]


def test_workers_take_the_interval_that_the_chief_says(
    exchange, steps_of_a_tenth, monkeypatch
):
    monkeypatch.setattr(replicas.WorkerValues, "chiefs", lambda self, value: 33)
    monkeypatch.setattr(replicas, "is_chief", lambda strategy: False)
    model = cases.codistill(cases.linear(0))
    exporter, due = steps_of_a_tenth(exchange), []
    monkeypatch.setattr(
        exporter, "_export", lambda wait: wait or due.append(exporter.step)
    )
    cases.fit(model, _X, _Y, epochs=12, batch_size=1, callbacks=[exporter])
    assert due == [100, 133, 166]


@pytest.mark.parametrize(("seed", "is_told"), [(0, True), (1, False)])
def test_a_group_that_began_as_another_is_named(
    exchange, monkeypatch, caplog, seed, is_told
):
    """Also by weights of 0, whose first loss is the same for any data."""
    monkeypatch.setenv("TFDISTILL_NUM_GROUPS", "2")
    for group, of_data in enumerate((0, seed)):
        monkeypatch.setenv("TFDISTILL_GROUP", str(group))
        student = cases.linear(0)
        student.set_weights([0 * w for w in student.get_weights()])
        exporter = tfdistill.callbacks.StudentExporter(exchange, every_steps=2)
        data = tf.data.Dataset.from_tensor_slices(cases.data(16, seed=of_data))
        cases.codistill(student).fit(
            data.batch(2), verbose=0, callbacks=[exporter]
        )
    assert ("Group 0 had this group's loss after step 2" in caplog.text) is (
        is_told
    )


def test_weights_that_are_not_finite_are_not_published(exchange, caplog):
    student = cases.linear(0)
    model = cases.codistill(student, optimizer=keras.optimizers.SGD(0.0))
    student.variables[1].assign([np.nan, 0.0, 0.0])
    exporter = _exporter(exchange)
    with caplog.at_level(logging.WARNING):
        _train(model, exporter, more=(cases.Unwatched(),))
    assert exchange.steps(0) == []
    assert (exporter.totals["published"], exporter.totals["failed"]) == (0, 4)
    assert "NaN or infinite" in caplog.text


def test_a_full_disk_costs_exports_only(exchange, caplog):
    model = cases.codistill(cases.deep(0))
    exporter = _exporter(exchange, pause_secs=1e-9)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Disk(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            full = batch in (1, 2)
            resource.setrlimit(
                resource.RLIMIT_FSIZE, (64 if full else limits[0], limits[1])
            )

    try:
        with caplog.at_level(logging.WARNING):
            logs = _train(model, exporter, more=[Disk()])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert np.isfinite(logs["loss"]).all()
    assert exchange.steps(0) == [1, 4]
    assert (exporter.totals["published"], exporter.totals["failed"]) == (2, 2)
    # Besides what tells readers how far the versions go.
    names = {*os.listdir(exchange.group_path(0))}
    assert sorted(n for n in names if not n.startswith(".")) == ["1", "4"]
    for step in (1, 4):
        exchange.verify(exchange.open(0, step))


def test_a_claim_that_is_lost_ends_training(exchange, caplog):
    model = cases.codistill(cases.linear(0))
    exporter = _exporter(exchange)

    class Other(keras.callbacks.Callback):
        """Claims the group as a second exchange of this process may."""

        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                self.claim = tfdistill.Exchange(exchange.root).claim(0)

    other = Other()
    with pytest.raises(claim.ClaimLostError):
        _train(model, exporter, more=[other])
    other.claim.release()
    assert exporter.totals["failed"] == 0
    assert exchange.steps(0)[-1] < 4


def test_a_group_of_another_run_cannot_be_trained(exchange):
    with tfdistill.Exchange(exchange.root).claim(0, run="/another"):
        with pytest.raises(ValueError, match="belongs to another run"):
            _train(cases.codistill(cases.linear(0)), _exporter(exchange))
    assert exchange.steps(0) == []


@pytest.fixture
def in_group_3(exchange, monkeypatch):
    monkeypatch.setenv("TFDISTILL_GROUP", "3")
    monkeypatch.setenv("TFDISTILL_NUM_GROUPS", "4")
    monkeypatch.setenv("TFDISTILL_EXCHANGE", exchange.root)


@pytest.mark.usefixtures("in_group_3")
def test_a_cluster_built_by_hand_trains_and_exports_as_it_says(
    exchange, monkeypatch
):
    given = tfdistill.Cluster(group=1, num_groups=2, exchange=exchange.root)
    own = tf.distribute.OneDeviceStrategy("CPU:0")
    monkeypatch.setattr(strategy_lib, "_one_task", lambda: own)
    with tfdistill.make_strategy(given).scope():
        model = cases.codistill(cases.linear(0))
    exporter = tfdistill.callbacks.StudentExporter(exchange, every_steps=1)
    _train(model, exporter)
    assert exchange.steps(1) and not exchange.steps(3)


# ---- loader ----


def _train_until_taught(exchange, model, peer):
    """Trains until version 7 teaches; returns the loader and the steps."""
    seen = []

    class Patience(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(int(batch))
            if model.teachers.status()[0]["step"] == 7:
                model.stop_training = True

    cases.publish(exchange, peer, step=7)
    loader = tfdistill.callbacks.TeacherLoader(every_steps=1)
    data = tf.data.Dataset.from_tensor_slices((_X, _Y)).batch(4).repeat()
    cases.fit(
        model, data, steps_per_epoch=20_000, callbacks=[loader, Patience()]
    )
    assert model.teachers.status()[0]["step"] == 7
    return loader, seen


def test_the_loader_brings_teachers_into_training(exchange):
    """Nothing is done by hand here: threads, polls and swaps are real."""
    before = set(threading.enumerate())
    model = cases.codistill(cases.linear(0), cases.peers(exchange))
    loader, _ = _train_until_taught(exchange, model, cases.linear(1))
    assert loader.num_refreshes == 1
    assert cases.fit(model, _X, _Y)["distillation_weight"] == [1]
    assert set(threading.enumerate()) <= before


def test_versions_that_were_not_heard_are_counted(exchange):
    model = cases.following(exchange)
    loader = cases.never()
    loader.set_model(model)
    assert loader.manifest_extras() == {}
    for step, count in ((1, 5), (2, 8), (3, 0), (4, 1)):
        extras = {"versions": count}
        cases.publish(exchange, cases.linear(1), step=step, extras=extras)
        cases.load(model, step)
    status = model.teachers.status()[0]
    # 6 and 7; then its group was started again.
    assert (status["swaps"], status["num_unheard"]) == (4, 2)
    assert status["lag_secs"] >= 0 and status["read_secs"] > 0
    assert loader.manifest_extras()["hears_secs"] >= 0.1


def test_another_graph_is_traced_into_running_training(exchange):
    model = cases.codistill(
        cases.linear(0),
        cases.peers(exchange, allow_other_graphs=True),
        optimizer=keras.optimizers.SGD(0.0),
    )
    peer = cases.deep(1)
    _, seen = _train_until_taught(exchange, model, peer)
    # Steps were traced with the student's own graph in the teacher's place.
    assert seen
    logs = cases.fit(model, _X, _Y, batch_size=16)
    target = cases.softmax(peer(_X).numpy())
    own = np.log(cases.softmax(model.student(_X).numpy()))
    assert logs["distillation_loss"][0] == pytest.approx(
        -(target * own).sum(-1).mean(), rel=1e-4
    )


# ---- mistakes ----


def test_a_plain_model_is_refused(exchange, tmp_path):
    model = cases.linear(0)
    model.compile("sgd", "mse")
    for callback in (
        _exporter(exchange),
        tfdistill.callbacks.TeacherLoader(every_steps=1),
        run_log.RunLogger(tmp_path),
    ):
        with pytest.raises(ValueError, match="Wrap your model"):
            model.fit(_X, np.eye(3)[_Y], verbose=0, callbacks=[callback])
