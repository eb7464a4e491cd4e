import errno
import os

import pytest
import storage_cases

from tfdistill import claim_files
from tfdistill import claim_record
from tfdistill import filesystem


class _Store(filesystem.LocalFileSystem):
    """Storage where nothing can be renamed, as behind a URL."""

    renames_atomically = False

    def rename(self, source, target):
        raise OSError(errno.ENOTSUP, "no rename", source)


def _record(incarnation="a", **changes):
    fields = dict(
        incarnation=incarnation, host="h", pid=1, machine="m", started=1
    )
    return claim_record.ClaimRecord(**{**fields, **changes})


@pytest.fixture(
    params=[
        filesystem.LocalFileSystem,
        storage_cases.NoDirectoryRename,
        _Store,
    ],
    ids=["renames", "no_directories", "store"],
)
def files(request, tmp_path):
    return claim_files.ClaimFiles(request.param(), f"{tmp_path}/group_0")


def test_there_is_no_claim_at_first(files):
    assert files.newest() is None
    assert files.read(1) is None
    files.remove_below(5)


def test_the_highest_number_counts(files, tmp_path):
    assert files.create(9, _record("a"))
    assert files.create(10, _record("b"))
    (tmp_path / "group_0/.claim-011").mkdir()
    (tmp_path / "group_0/.claim-x").mkdir()
    newest = files.newest()
    assert (newest.number, newest.record) == (10, _record("b"))
    files.remove_below(10)
    assert files.read(9) is None
    assert files.newest() == newest


def test_a_claim_is_made_once(files, tmp_path):
    assert files.create(1, _record("a"))
    assert not files.create(1, _record("b"))
    assert files.newest().record == _record("a")
    assert os.listdir(tmp_path / "group_0") == [".claim-1"]


def test_a_claim_is_replaced_as_a_whole(files, tmp_path):
    files.create(1, _record())
    changed = _record(counter=3, released=True)
    files.write(1, changed)
    assert files.read(1).record == changed
    assert os.listdir(tmp_path / "group_0/.claim-1") == ["owner.json"]


def test_it_is_known_whether_one_alone_can_make_a_claim(tmp_path):
    known = {}
    for kind in (
        filesystem.LocalFileSystem,
        storage_cases.NoDirectoryRename,
        _Store,
    ):
        files = claim_files.ClaimFiles(kind(), f"{tmp_path}/{kind.__name__}")
        files.create(1, _record())
        known[kind] = files.creates_exclusively
    assert known == {
        filesystem.LocalFileSystem: True,
        storage_cases.NoDirectoryRename: False,
        _Store: False,
    }


def test_a_claim_that_is_being_written_counts(files, tmp_path):
    os.makedirs(tmp_path / "group_0/.claim-4")
    assert files.newest() == claim_files.Claim(4, b"", None)


def test_other_failures_are_not_taken_for_a_faster_process(tmp_path):
    class ReadOnly(filesystem.LocalFileSystem):
        def rename(self, source, target):
            raise OSError(errno.EROFS, "Read-only file system", target)

    files = claim_files.ClaimFiles(ReadOnly(), str(tmp_path))
    with pytest.raises(OSError, match="Read-only"):
        files.create(1, _record())
    assert os.listdir(tmp_path) == []


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
