"""Backups of a training on parameter servers, in one process."""

import dataclasses
import pathlib
import shutil

import keras
import numpy as np
import pytest

import tfdistill
from tests.cases import backup as cases
from tests.cases import codistillation as peers
from tests.cases import servers
from tests.cases import tiers
from tfdistill.backup import replicas
from tfdistill.cluster import ending
from tfdistill.parameter_server import variables
from tfdistill.training import auto_steps
from tfdistill.training import steps


@pytest.fixture
def on_servers(monkeypatch):
    """Every model is one on parameter servers."""
    servers.pretend(monkeypatch)


def _begun(directory, optimizer="adagrad", extra=()):
    """A backup whose `fit` has begun, and the model of that."""
    model = servers.remote(
        servers.student(*extra), keras.optimizers.get(optimizer)
    )
    return servers.backed_up(model, directory), model


def _point(step, **kwargs):
    return steps.TrainingPoint(step=step, **{"epoch": 0, "batch": 0, **kwargs})


def _steps(directory):
    return sorted(int(path.parent.name) for path in _manifests(directory))


def _manifests(directory):
    return pathlib.Path(directory).rglob("manifest.json")


def _fill(model, value):
    for variable in model.student.trainable_variables:
        variable.assign(np.full(variable.shape, value))


def _values(model):
    return {float(value) for w in servers.weights(model) for value in w.flat}


@pytest.mark.usefixtures("on_servers")
def test_it_resumes_from_the_newest(tmp_path):
    callback, model = _begun(tmp_path)
    assert callback.point is None
    for step in (5, 10):
        _fill(model, step)
        callback.on_quiet(_point(step))
    last = _point(15, epoch=2, batch=3, metric_sums=(0.25, 7.0))
    _fill(model, 15)
    callback.on_quiet(last)
    assert _steps(tmp_path) == [10, 15]
    resumed, other = _begun(tmp_path)
    assert resumed.point == last
    assert _values(other) == {15.0}


@pytest.mark.usefixtures("on_servers")
@pytest.mark.parametrize(
    "other",
    [{"optimizer": "sgd"}, {"extra": (keras.layers.Dense(3),)}],
    ids=["optimizer", "model"],
)
def test_a_backup_of_something_else_is_refused(tmp_path, other):
    _begun(tmp_path)[0].on_quiet(_point(5))
    with pytest.raises(ValueError, match="differs in .*trainable/"):
        _begun(tmp_path, **other)


@pytest.mark.usefixtures("on_servers")
def test_a_failure_to_write_is_counted_and_leaves_what_is_there(
    tmp_path, caplog, monkeypatch
):
    callback, _ = _begun(tmp_path)
    callback.on_quiet(_point(5))

    def fail(self, directory, snapshot):
        pathlib.Path(directory, "state.half").touch()
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(variables.ServerState, "write", fail)
        callback.on_quiet(_point(10))
    assert "Step 10 was not backed up" in caplog.text
    assert "the disk is full" in caplog.text
    assert callback.num_failed == 1
    assert _steps(tmp_path) == [5]
    assert not list(tmp_path.rglob("*.half"))
    callback.on_quiet(_point(10))
    assert callback.num_failed == 1
    assert _steps(tmp_path) == [5, 10]


@pytest.mark.usefixtures("on_servers")
def test_a_chief_that_is_to_end_does_so_after_its_backup(tmp_path, monkeypatch):
    callback, _ = _begun(tmp_path)
    there = []
    monkeypatch.setattr(ending, "requested", lambda: True)
    monkeypatch.setattr(
        ending, "finish", lambda: there.append(_steps(tmp_path))
    )
    callback.on_quiet(_point(5))
    assert there == [[5]]


CASES = {
    "endless": cases.Case(),
    "finite": cases.Case(
        data=cases.finite,
        fit={},
        optimizer=lambda: keras.optimizers.Adam(
            keras.optimizers.schedules.CosineDecay(0.05, 15)
        ),
    ),
    "executions": cases.Case(
        data=cases.unknown,
        fit={},
        validates=True,
        steps_per_execution=2,
        optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        callbacks=lambda: [
            keras.callbacks.ReduceLROnPlateau(patience=1, min_delta=10.0)
        ],
    ),
}


# Keras warns when data of unknown length end for the first time.
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize(
    ("name", "stops"),
    [tiers.deep("finite", [4, 9]), ("executions", [5])],
    ids=str,
)
def test_it_ends_as_if_it_had_never_stopped(name, stops, tmp_path):
    whole, expected_logs, _ = cases.train(CASES[name])
    for after in stops:
        cases.train(CASES[name], tmp_path, stop_after=after)
    model, logs, backup = cases.train(CASES[name], tmp_path)
    assert backup.resumed_step
    cases.assert_same(cases.values(model), cases.values(whole))
    assert logs.found.keys() < expected_logs.found.keys()
    assert logs.found == {key: expected_logs.found[key] for key in logs.found}
    if CASES[name].data is cases.finite:
        assert cases.times_seen(model) == {CASES[name].epochs}


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize(
    ("every_steps", "step", "epochs"),
    [
        # At the end of the epoch; at a batch that was not known to be its
        # last; and where nothing is left to be done.
        tiers.deep(None, 6, 3),
        (6, 6, 3),
        tiers.deep(4, 12, 2),
    ],
)
def test_it_resumes_at_the_end_of_an_epoch_of_unknown_length(
    every_steps, step, epochs, tmp_path, start_again
):
    case = dataclasses.replace(
        CASES["executions"], steps_per_execution=1, epochs=epochs
    )
    whole, expected, _ = cases.train(case)
    assert int(whole.optimizer.iterations.numpy()) == 6 * epochs
    cases.train(
        case,
        tmp_path,
        stop_after=7 if epochs == 3 else None,
        every_steps=every_steps,
    )
    start_again()
    model, logs, backup = cases.train(case, tmp_path, every_steps=every_steps)
    assert backup.resumed_step == step
    cases.assert_same(cases.values(model), cases.values(whole))
    assert logs.found == {key: expected.found[key] for key in logs.found}
    assert bool(logs.found) == (epochs == 3)


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize(("asked", "step"), [(8, 8), (6, 7)])
def test_a_task_that_is_asked_to_end_knows_no_last_batch(
    asked, step, tmp_path, monkeypatch
):
    case = dataclasses.replace(CASES["executions"], steps_per_execution=1)
    whole, *_ = cases.train(case)
    is_asked = [False]

    def finish():
        raise cases.Stopped

    monkeypatch.setattr(ending, "requested", lambda: is_asked[0])
    monkeypatch.setattr(ending, "finish", finish)
    at = cases.AtStep(asked, lambda _: is_asked.__setitem__(0, True))
    cases.train(case, tmp_path, every_steps=100, callbacks=[at])
    monkeypatch.undo()
    model, _, backup = cases.train(case, tmp_path, every_steps=100)
    assert backup.resumed_step == step
    cases.assert_same(cases.values(model), cases.values(whole))


@pytest.mark.deep
def test_the_steps_of_an_execution_may_be_found_anew(tmp_path, monkeypatch):
    # It grows as soon as it can.
    monkeypatch.setattr(auto_steps, "_LEAST_SECS", 0.0)
    monkeypatch.setattr(auto_steps, "_LEAST_GAIN", 0.0)
    single = cases.Case(fit={"steps_per_epoch": 40}, epochs=2)
    whole, *_ = cases.train(single)
    case = dataclasses.replace(single, steps_per_execution="auto")
    cases.train(case, tmp_path, stop_after=19, every_steps=10)
    model, _, backup = cases.train(case, tmp_path, every_steps=10)
    assert backup.resumed_step % 10 == 0
    assert model.trainer.num_steps > 1
    cases.assert_same(cases.values(model), cases.values(whole))


@pytest.mark.parametrize("replicas", [1, tiers.deep(2)])
def test_data_that_can_begin_anywhere_are_not_read_again(
    replicas, tmp_path, two_replicas
):
    strategy, begun = two_replicas if replicas == 2 else None, []
    case = cases.Case(data=lambda: cases.resumable(begun))
    whole, *_ = cases.train(case, strategy=strategy)
    cases.train(case, tmp_path, strategy=strategy, stop_after=10)
    model, *_ = cases.train(case, tmp_path, strategy=strategy)
    assert begun == [0, 0, 0, 9]
    found, expected = (cases.values(m, strategy) for m in (model, whole))
    cases.assert_same(found, expected)


@pytest.fixture(scope="module")
def stopped_on_two_replicas(tmp_path_factory, two_replicas):
    """The backups of a training that was stopped; what it had at step 9."""
    directory = tmp_path_factory.mktemp("replicas")
    kept = {}
    keep = cases.AtStep(
        9, lambda model: kept.update(cases.values(model, two_replicas))
    )
    cases.train(
        cases.REPLICAS,
        directory,
        strategy=two_replicas,
        stop_after=10,
        callbacks=[keep],
    )
    return directory, kept


def _copied(directory, tmp_path):
    return shutil.copytree(directory, tmp_path / "backup")


class _Begin(keras.callbacks.Callback):
    """Notes what training begins with."""

    values = None

    def on_train_batch_begin(self, batch, logs=None):
        self.values = self.values or cases.values(self.model)


@pytest.mark.deep
def test_another_number_of_replicas_goes_on_from_their_mean(
    tmp_path, stopped_on_two_replicas, caplog
):
    directory, kept = stopped_on_two_replicas
    begin = _Begin()
    cases.train(cases.REPLICAS, _copied(directory, tmp_path), callbacks=[begin])
    assert "made with 2 replicas, and now there are 1" in caplog.text
    for key, found in begin.values.items():
        one, other = kept[key], kept[f"{key[:-1]}1"]
        is_float = np.issubdtype(one.dtype, np.floating)
        expected = (one + other) / 2 if is_float else one
        np.testing.assert_allclose(found, expected, rtol=1e-6, err_msg=key)


def test_the_teachers_are_those_of_the_backup(tmp_path, exchange):
    teacher = cases.student()
    peers.publish(exchange, teacher, step=10)
    # It isn't compared with the student, who knows more.
    held_out = cases.numbered(8).batch(4).map(lambda x, *_: x)

    def taught(directory=None, **kwargs):
        at_step = cases.AtStep(4, lambda model: peers.load(model, 10))
        return cases.train(
            cases.Case(callbacks=lambda: [at_step, peers.never()]),
            directory,
            teachers=peers.peers(exchange, canary=held_out),
            **kwargs,
        )

    whole, expected, _ = taught()
    taught(tmp_path / "backup", stop_after=8)
    # The version of then is used, not the newest.
    peers.randomize(teacher, 9)
    peers.publish(exchange, teacher, step=20)
    model, logs, backup = taught(tmp_path / "backup")
    assert backup.resumed_step == 6
    (status,) = model.teachers.status()
    assert (status["step"], status["share"]) == (10, 1)
    cases.assert_same(cases.values(model), cases.values(whole))
    assert logs.found == {key: expected.found[key] for key in logs.found}


class _Renamed(steps.SteppedCallback):
    backup_key = "First"

    def state(self):
        return {"seen": 7}

    def restore(self, state):
        self.seen = state["seen"]


@pytest.mark.parametrize("number", [".2", "/2"])
def test_callbacks_of_a_class_find_their_states(number):
    """Whatever stands before them, and in backups of earlier versions."""

    def kept(*others):
        found = [keras.callbacks.ReduceLROnPlateau() for _ in range(2)]
        for wait, each in enumerate(found):
            each.wait, each.best = wait, 0.5
        renamed = _Renamed()
        return replicas.kept_of([*others, found[0], renamed, found[1]]), found

    states = replicas.states_of(kept()[0])
    second = states.pop("ReduceLROnPlateau.2")
    states[f"ReduceLROnPlateau{number}"] = second
    found, plateaus = kept(keras.callbacks.EarlyStopping())
    for each in plateaus:
        each.wait = -1
    replicas.set_states(found, replicas.by_present_keys(states))
    assert [each.wait for each in plateaus] == [0, 1]
    assert found["First"].seen == 7


class _Newest(keras.callbacks.Callback):
    """Notes the newest version that peers see."""

    def __init__(self, exchange):
        super().__init__()
        self._exchange, self.steps = exchange, []

    def on_train_batch_end(self, batch, logs=None):
        found = self._exchange.latest(0)
        self.steps.append(found.step if found else -1)


def test_versions_never_go_backwards(tmp_path, exchange):
    newest = _Newest(exchange)
    totals = []
    for after in (11, None):
        exporter = tfdistill.callbacks.StudentExporter(exchange, every_steps=1)
        cases.train(
            CASES["endless"],
            tmp_path / "backup",
            stop_after=after,
            every_steps=6,
            callbacks=[exporter, newest],
        )
        totals.append(exporter.totals)
    assert newest.steps == sorted(newest.steps)
    assert exchange.latest(0).step == 15
    assert totals[1]["failed"] == 0


def test_a_finished_training_is_not_done_again(tmp_path, start_again):
    whole, *_ = cases.train(CASES["endless"], tmp_path, every_steps=7)
    start_again()
    model, logs, backup = cases.train(CASES["endless"], tmp_path)
    assert (backup.resumed_step, logs.found) == (15, {})
    cases.assert_same(cases.values(model), cases.values(whole))


@pytest.mark.parametrize("epochs", [6, tiers.deep(2)])
def test_what_early_stopping_ended_is_over(epochs, tmp_path, start_again):
    """And has the weights that it restored, also if it trained all epochs."""

    def stopper():
        # The first epoch has the largest loss.
        return keras.callbacks.EarlyStopping(
            "loss", mode="max", patience=2, restore_best_weights=True
        )

    case = cases.Case(epochs=epochs, callbacks=lambda: [stopper()])
    first = cases.Case(epochs=1)
    best, *_ = cases.train(first)
    whole, *_ = cases.train(case, tmp_path, every_steps=None)
    steps_done = 5 * min(epochs, 3)
    assert int(whole.optimizer.iterations.numpy()) == steps_done
    peers.assert_close(whole.trainable_weights, best.trainable_weights)
    start_again()
    model, logs, backup = cases.train(case, tmp_path, every_steps=None)
    assert (backup.resumed_step, logs.found) == (steps_done, {})
    cases.assert_same(cases.values(model), cases.values(whole))


def _fits(directory=None, stop_in=None):
    """What a script trains that calls `fit` four times, with one directory."""
    (x, y), done = peers.data(), []

    def fit(model):
        extra = []
        if directory and isinstance(model, tfdistill.DistributedModel):
            extra.append(tfdistill.callbacks.Backup(directory, every_steps=3))
            extra.append(cases.Patient(extra[0]))
            if stop_in == len(done):
                extra.append(cases.StopAt(4))
        history = model.fit(
            x, y, batch_size=8, epochs=2, verbose=0, callbacks=extra
        )
        rows = history.epoch, history.history["loss"]
        done.append([*model.get_weights(), *rows])

    def new(seed):
        keras.utils.set_random_seed(seed)
        inside = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(5, "tanh"),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(3),
            ]
        )
        model = tfdistill.DistributedModel(inside) if directory else inside
        return inside, compiled(model, keras.optimizers.Adam(0.1))

    def compiled(model, optimizer):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss)
        return model

    for seed in (0, 1):  # Such as one for each fold.
        inside, model = new(seed)
        fit(model)
    fit(model)
    inside.layers[0].trainable = False
    fit(compiled(model, keras.optimizers.SGD(0.1)))
    return done


def test_a_second_fit_is_no_restart(tmp_path, start_again):
    """Each trains as with Keras alone; of a restart each finds its own."""
    expected = _fits()
    found = _fits(tmp_path / "whole")
    for actual, own in zip(found, expected, strict=True):
        for one, other in zip(actual, own, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-6)
    with pytest.raises(cases.Stopped):
        _fits(tmp_path / "stopped", stop_in=3)
    start_again()
    again = _fits(tmp_path / "stopped")
    for actual, own in zip(again, found, strict=True):
        for one, other in zip(actual, own, strict=True):
            np.testing.assert_array_equal(one, other)
    names = {path.name for path in (tmp_path / "stopped").iterdir()}
    assert names == {"group_0", *(f"fit_{number}" for number in (2, 3, 4))}
