"""Backups of a training on parameter servers, in one process."""

import logging
import pathlib

import keras
import numpy as np
import parameter_server_cases as cases
import pytest

from tfdistill import backup
from tfdistill import parameter_server
from tfdistill import training_state


def _state(optimizer="adagrad", extra=()):
    model = cases.remote(cases.student(*extra), keras.optimizers.get(optimizer))
    _, found, update = cases.step_of(model)
    return training_state.TrainingState(found, update), model


def _point(step, **kwargs):
    return training_state.TrainingPoint(
        step=step, **{"epoch": 0, "batch": 0, **kwargs}
    )


def _steps(directory):
    return sorted(int(path.parent.name) for path in _manifests(directory))


def _manifests(directory):
    return pathlib.Path(directory).rglob("manifest.json")


def _fill(model, value):
    for variable in model.student.trainable_variables:
        variable.assign(np.full(variable.shape, value))


def _values(model):
    return {float(value) for w in cases.weights(model) for value in w.flat}


def test_it_resumes_from_the_newest(tmp_path):
    state, model = _state()
    callback = backup.Backup(tmp_path)
    assert callback.restore(state) is None
    for step in (5, 10):
        _fill(model, step)
        callback.on_quiet(_point(step), state)
    last = _point(15, epoch=2, batch=3, metric_sums=(0.25, 7.0))
    _fill(model, 15)
    callback.on_quiet(last, state)
    assert callback.num_backups == 3
    other, resumed = _state()
    assert backup.Backup(tmp_path).restore(other) == last
    assert _values(resumed) == {15.0}


@pytest.mark.parametrize("damage", ["cut", "gone", "changed"])
def test_a_damaged_backup_is_passed_over(tmp_path, caplog, damage):
    state, model = _state()
    callback = backup.Backup(tmp_path)
    for step in (5, 10):
        _fill(model, step)
        callback.on_quiet(_point(step), state)
    (newest,) = (
        p.parent for p in _manifests(tmp_path) if p.parent.name == "10"
    )
    data = max(newest.glob("state.data*"), key=lambda p: p.stat().st_size)
    content = data.read_bytes()
    if damage == "gone":
        data.unlink()
    elif damage == "cut":
        data.write_bytes(content[:-1])
    else:
        data.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    found = backup.Backup(tmp_path).restore(state)
    assert found == _point(5)
    assert _values(model) == {5.0}
    assert "Trying the backup before" in caplog.text


@pytest.mark.parametrize(
    "other",
    [{"optimizer": "sgd"}, {"extra": (keras.layers.Dense(3),)}],
    ids=["optimizer", "model"],
)
def test_a_backup_of_something_else_is_refused(tmp_path, other):
    backup.Backup(tmp_path).on_quiet(_point(5), _state()[0])
    with pytest.raises(ValueError, match="differs in .*trainable/"):
        backup.Backup(tmp_path).restore(_state(**other)[0])


@pytest.mark.parametrize("max_to_keep", [2, 3])
def test_it_keeps_as_many_as_it_should(tmp_path, max_to_keep):
    state, _ = _state()
    callback = backup.Backup(tmp_path, max_to_keep=max_to_keep)
    for step in range(1, 6):
        callback.on_quiet(_point(step), state)
    assert _steps(tmp_path) == list(range(1, 6))[-max_to_keep:]


def test_a_failure_to_write_is_counted_and_leaves_what_is_there(
    tmp_path, caplog, monkeypatch
):
    state, _ = _state()
    callback = backup.Backup(tmp_path)
    callback.on_quiet(_point(5), state)

    def fail(prefix):
        pathlib.Path(f"{prefix}.half").touch()
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(state, "write", fail)
        callback.on_quiet(_point(10), state)
    assert "Step 10 was not backed up" in caplog.text
    assert "the disk is full" in caplog.text
    assert (callback.num_failed, callback.num_backups) == (1, 1)
    assert _steps(tmp_path) == [5]
    assert not list(tmp_path.rglob("*.half"))
    callback.on_quiet(_point(10), state)
    assert (callback.num_failed, callback.num_backups) == (1, 2)
    assert _steps(tmp_path) == [5, 10]


def test_a_step_is_backed_up_once(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    state, _ = _state()
    callback = backup.Backup(tmp_path)
    for _ in range(2):
        callback.on_quiet(_point(5), state)
    assert (callback.num_failed, callback.num_backups) == (0, 1)
    assert "Step 5 was backed up before" in caplog.text


def _attached(callback, monkeypatch, steps=20):
    monkeypatch.setattr(parameter_server, "is_used", lambda strategy: True)
    callback.set_params({"steps": steps})
    callback.set_model(cases.remote(steps_per_execution=3))
    callback.on_train_begin()
    return callback


def test_it_asks_for_quiet_when_a_multiple_is_passed(tmp_path, monkeypatch):
    callback = _attached(backup.Backup(tmp_path, every_steps=5), monkeypatch)
    callback.on_epoch_begin(0)
    due = []
    for batch in (2, 5, 8, 11, 14):
        callback.on_train_batch_end(batch)
        due.append(callback.wants_quiet)
        callback.wants_quiet = False
    assert due == [False, True, False, True, True]
    callback.on_epoch_end(0)
    assert not callback.wants_quiet


def test_by_default_it_asks_at_the_end_of_each_epoch(tmp_path, monkeypatch):
    callback = _attached(backup.Backup(tmp_path), monkeypatch)
    callback.on_epoch_begin(0)
    callback.on_train_batch_end(19)
    assert not callback.wants_quiet
    callback.on_epoch_end(0)
    assert callback.wants_quiet
    callback.on_quiet(_point(20, epoch=1), _state()[0])
    assert not callback.wants_quiet


def test_it_is_for_codistilled_models(tmp_path):
    inputs = keras.Input((3,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="given to the `fit` of a"):
        model.fit(
            np.ones([2, 3]),
            np.ones([2, 1]),
            callbacks=[backup.Backup(tmp_path)],
            verbose=0,
        )


def test_the_interval_is_checked(tmp_path):
    with pytest.raises(ValueError, match="`every_steps` must be"):
        backup.Backup(tmp_path, every_steps=0)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
