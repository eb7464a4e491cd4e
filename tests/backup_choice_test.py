"""All workers of a group go on from one backup, or none of them does."""

import pathlib

import pytest
import tensorflow as tf

from tfdistill import backup_choice
from tfdistill import backup_store
from tfdistill import chief_only
from tfdistill import worker_values

EXTRAS = {"epoch": 1, "batch": 2, "data": {"batches": 7}}


def _saved(directory, *steps):
    store = backup_store.BackupStore(directory, max_to_keep=9)
    for step in steps:
        store.save(
            lambda path: pathlib.Path(path, backup_choice.HOST).write_text(
                '{"seed": 3}'
            ),
            step=step,
            variables={},
            extras=EXTRAS,
        )
    return store


def _choice(store, monkeypatch, *, is_chief=True, others=()):
    """The choice of one of two workers; the other one says `others`."""
    said = iter(others)
    monkeypatch.setattr(chief_only, "is_chief", lambda strategy: is_chief)
    if others:
        monkeypatch.setattr(
            worker_values.WorkerValues,
            "gathered",
            lambda self, value: [int(value), next(said)],
        )
    return backup_choice.BackupChoice(store, tf.distribute.get_strategy())


def test_the_chief_takes_the_newest(tmp_path, monkeypatch):
    store = _saved(tmp_path, 3, 12)
    chosen = _choice(store, monkeypatch).choose()
    assert (chosen.point.step, chosen.point.epoch) == (12, 1)
    assert (chosen.point.batch, chosen.point.data) == (2, {"batches": 7})
    assert chosen.host == {"seed": 3}


def test_without_any_training_starts_anew(tmp_path, monkeypatch):
    assert _choice(_saved(tmp_path), monkeypatch).choose() is None


def test_a_worker_takes_what_the_chief_says(tmp_path, monkeypatch):
    store = _saved(tmp_path, 3, 12)
    choice = _choice(store, monkeypatch, is_chief=False, others=(0, 3, 0))
    assert choice.choose().point.step == 3


def test_a_worker_that_sees_no_backup_says_so(tmp_path, monkeypatch):
    store = _saved(tmp_path / "own")
    choice = _choice(store, monkeypatch, is_chief=False, others=(0, 12, 0))
    with pytest.raises(RuntimeError, match="that all of them see") as caught:
        choice.choose()
    assert str(tmp_path) in str(caught.value)


def test_the_chief_ends_with_a_worker_that_cannot_read(tmp_path, monkeypatch):
    store = _saved(tmp_path, 12)
    choice = _choice(store, monkeypatch, others=(0, -1, 1))
    with pytest.raises(RuntimeError, match=r"the replicas \[1\] could not"):
        choice.choose()


def test_workers_end_with_a_chief_that_cannot_read(tmp_path, monkeypatch):
    store = _saved(tmp_path, 12)
    choice = _choice(store, monkeypatch, is_chief=False, others=(1,))
    with pytest.raises(RuntimeError, match=r"the replicas \[1\] could not"):
        choice.choose()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
