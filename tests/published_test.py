"""Tests of the newest versions, as found without reading what they hold."""

import errno

import pytest
import run_cases as cases
import storage_cases

from tfdistill import filesystem
from tfdistill import published


def _newest(root, group=0):
    return published.newest(filesystem.LocalFileSystem(), str(root), group)


def test_the_newest_version_is_the_highest_step(tmp_path):
    assert _newest(tmp_path) is None
    for step in (9, 100, 20):
        cases.version(tmp_path, 0, step, created=5.0, num_bytes=step)
    cases.version(tmp_path, 1, 300)
    (tmp_path / "group_0" / "400").mkdir()  # Not committed.
    (tmp_path / "group_0" / ".tmp-500").mkdir()
    found = _newest(tmp_path)
    assert (found.step, found.num_bytes, found.created) == (100, 100, 5.0)
    assert found.modified > 5.0
    assert found.broken == ()


def test_broken_versions_are_passed_over_and_named(tmp_path):
    cases.version(tmp_path, 0, 10)
    for step in (20, 30):
        cases.version(tmp_path, 0, step).write_text("{")
    found = _newest(tmp_path)
    assert (found.step, found.broken) == (10, (30, 20))


def test_an_object_store_is_looked_at_like_a_disk(tmp_path):
    store = storage_cases.MemoryFileSystem()
    path = cases.version(tmp_path, 0, 10)
    store.write("m/group_0/10/manifest.json", [path.read_bytes()])
    assert published.newest(store, "m", 0).step == 10
    watch = published.PublishedWatch(
        "m", open_storage=lambda root: (store, root)
    )
    assert watch.look((), limit_secs=30)[0].step == 10
    assert list(watch.groups) == [0]


def test_a_failing_storage_is_told_and_what_was_found_stays(tmp_path):
    cases.version(tmp_path, 0, 10)
    storage = storage_cases.Faults(filesystem.LocalFileSystem())
    now = [0.0]
    watch = published.PublishedWatch(
        str(tmp_path),
        open_storage=lambda root: (storage, root),
        clock=lambda: now[0],
    )
    assert watch.look([0], limit_secs=30)[0].step == 10
    storage.hidden[str(tmp_path)] = errno.EIO
    assert watch.look([0], limit_secs=30)[0].step == 10
    assert watch.problem == ""  # Not looked at again so soon.
    now[0] += 10
    assert watch.look([0], limit_secs=30)[0].step == 10
    assert "Input/output error" in watch.problem
    storage.hidden.clear()
    now[0] += 10
    watch.look([0], limit_secs=30)
    assert watch.problem == ""


def test_a_scheme_that_nobody_knows_is_told():
    watch = published.PublishedWatch(
        "nearly:/x", open_storage=filesystem.for_root
    )
    assert watch.look([0], limit_secs=30) == {}
    assert "must have two slashes" in watch.problem


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
