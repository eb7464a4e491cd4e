"""All workers of a group go on from one backup, or none of them does."""

import pathlib
import shutil

import numpy as np
import pytest

from tests.cases import backup as cases
from tests.cases import codistillation
from tfdistill.backup import store as backup_store
from tfdistill.training import steps as steps_lib

EXTRAS = {"epoch": 1, "batch": 2, "data": {"batches": 7}}


def _saved(directory, *steps):
    store = backup_store.BackupStore(directory, max_to_keep=9)
    for step in steps:
        point = steps_lib.TrainingPoint(step=step, **EXTRAS)
        store.save(_State(), b"1234", point, host={"seed": 3})
    return store


def _choose(store, *, is_chief=True, others=()):
    """The choice of one of two workers; the other one says `others`."""
    said = iter(others)
    return backup_store.choose(
        store,
        lambda value: [int(value), *(next(said) for _ in others[:1])],
        is_chief=is_chief,
    )


def test_an_object_store_cannot_hold_checkpoints():
    pytest.importorskip("s3fs")
    with pytest.raises(ValueError, match="only the exchange"):
        backup_store.BackupStore("s3://bucket/backup")


def test_a_worker_takes_what_the_chief_says(tmp_path):
    store = _saved(tmp_path, 3, 12)
    chosen = _choose(store, is_chief=False, others=(0, 3, 0))
    assert chosen.point.step == 3


def test_a_worker_that_sees_no_backup_says_so(tmp_path):
    store = _saved(tmp_path / "own")
    with pytest.raises(
        RuntimeError, match="that all workers can read"
    ) as caught:
        _choose(store, is_chief=False, others=(0, 12, 0))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "others",
    [{"is_chief": True, "others": (0, -1, 1)}]
    + [{"is_chief": False, "others": (1,)}],
    ids=["chief", "worker"],
)
def test_all_end_with_one_that_cannot_read(tmp_path, others):
    with pytest.raises(RuntimeError, match=r"The workers \[1\] could not"):
        _choose(_saved(tmp_path, 12), **others)


DAMAGES = {
    "cut": lambda content: content[: len(content) // 2],
    "flipped": lambda content: (
        content[: len(content) // 2]
        + bytes([content[len(content) // 2] ^ 1])
        + content[len(content) // 2 + 1 :]
    ),
    "gone": lambda content: None,
}
FILES = (
    "state.index",
    "state.data-00000-of-00001",
    "host.json",
    "manifest.json",
)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The backups of steps 3 and 6 of a training that was stopped at 8."""
    directory = tmp_path_factory.mktemp("backups")
    cases.train(cases.Case(), directory, stop_after=8)
    whole, *_ = cases.train(cases.Case())
    return directory, cases.values(whole)


@pytest.fixture
def backups(stopped, tmp_path):
    """A copy of them to damage."""
    return pathlib.Path(shutil.copytree(stopped[0], tmp_path / "backups"))


def _damage(directory, step, name, kind):
    path = directory / "group_0" / str(step) / name
    content = DAMAGES[kind](path.read_bytes())
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)


def _steps(directory):
    found = (directory / "group_0").glob("[0-9]*")
    return sorted(int(path.name) for path in found)


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_backup_is_passed_over(backups, name, kind, caplog):
    _damage(backups, 6, name, kind)
    version = backup_store.BackupStore(backups).newest()
    assert version.step == 3
    assert "Trying the backup before" in caplog.text
    assert str(backups / "group_0" / "6") in caplog.text


def test_without_a_whole_one_training_starts_anew(backups, caplog, stopped):
    for step in (3, 6):
        _damage(backups, step, "host.json", "cut")
    model, _, backup = cases.train(cases.Case(), backups)
    assert backup.resumed_step is None
    assert "no complete backup left" in caplog.text
    cases.assert_same(cases.values(model), stopped[1])


def test_damaged_ones_never_push_out_whole_ones(tmp_path):
    directory = tmp_path / "backups"
    for step in (3, 6, 9):
        _publish(backup_store.BackupStore(directory, max_to_keep=3), step)
    for step in (6, 9):
        _damage(directory, step, "file", "cut")
    store = backup_store.BackupStore(directory)
    assert store.newest().step == 3
    assert _steps(directory) == [3]
    _publish(store, 4)
    _publish(store, 5)
    assert store.newest().step == 5
    assert _steps(directory) == [4, 5]


def _publish(store, step):
    point = steps_lib.TrainingPoint(step=step, epoch=0, batch=0)
    store.save(_State(), b"1234", point, host={})


class _State:
    """One file."""

    def specs(self):
        return {}

    def layout(self):
        return {}

    def write(self, directory, snapshot):
        pathlib.Path(directory, "file").write_bytes(snapshot)


def test_what_a_killed_writer_left_is_no_backup(backups):
    left = backups / "group_0" / ".tmp-9-of-another-process"
    shutil.copytree(backups / "group_0" / "6", left)
    assert backup_store.BackupStore(backups).newest().step == 6


def test_a_backup_of_another_model_is_refused(backups):
    with pytest.raises(ValueError, match="must be of this model and optimizer"):
        cases.train(cases.Case(num_classes=4), backups)


def test_weights_that_are_not_finite_are_not_backed_up(tmp_path, caplog):
    def poison(model):
        kernel = model.student.trainable_variables[0]
        kernel.assign(np.full(kernel.shape, np.nan))

    callbacks = [cases.AtStep(7, poison), codistillation.Unwatched()]
    _, _, backup = cases.train(cases.Case(), tmp_path, callbacks=callbacks)
    assert _steps(tmp_path) == [3, 6]
    assert backup.num_failed == 3
    assert "Step 9 was not backed up" in caplog.text
    assert "NaN" in caplog.text
