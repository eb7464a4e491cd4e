"""The file operations of local disks and of URLs."""

import errno
import os
import pathlib

import pytest

from tfdistill.exchange import filesystem


@pytest.fixture(params=["local", "ram"])
def place(request, tmp_path):
    """A file system and an empty directory of it."""
    if request.param == "local":
        return filesystem.for_root(tmp_path)
    pytest.importorskip("tensorflow")
    found, root = filesystem.for_root(f"ram://{tmp_path.name}")
    found.make_dirs(root)
    return found, root


def test_what_is_written_is_listed_and_read(place):
    fs, root = place
    fs.write(f"{root}/a/b/file", [b"one", b"", b"two"])
    fs.write(f"{root}/a/empty", [])
    fs.make_dirs(f"{root}/a/c")
    fs.make_dirs(f"{root}/a/c")
    assert fs.list_dir(root) == ["a"]
    assert sorted(fs.list_dir(f"{root}/a")) == ["b", "c", "empty"]
    assert b"".join(fs.blocks(f"{root}/a/b/file")) == b"onetwo"
    assert list(fs.blocks(f"{root}/a/empty")) == []
    assert fs.stat(f"{root}/a/b/file")[:3] == (False, True, 6)
    assert fs.stat(f"{root}/a/b")[:2] == (True, False)
    fs.sync(f"{root}/a/b/file")
    fs.sync(f"{root}/a")


def test_walk_gives_all_below(place):
    fs, root = place
    for name in ("x", "d/y", "d/e/z"):
        fs.write(f"{root}/{name}", [b"1"])
    found = {name: stat.is_dir for name, stat in filesystem.walk(fs, root)}
    assert found == {
        "x": False,
        "d": True,
        "d/y": False,
        "d/e": True,
        "d/e/z": False,
    }


def test_removing(place):
    fs, root = place
    fs.write(f"{root}/d/x", [b"1"])
    fs.write(f"{root}/d/y", [b"1"])
    fs.remove(f"{root}/d/x")
    assert fs.list_dir(f"{root}/d") == ["y"]
    fs.remove_tree(f"{root}/d")
    fs.remove_tree(f"{root}/d")
    assert fs.list_dir(root) == []


def test_what_is_absent_is_an_os_error(place):
    fs, root = place
    for call in (
        lambda: fs.list_dir(f"{root}/no"),
        lambda: fs.stat(f"{root}/no"),
        lambda: list(fs.blocks(f"{root}/no")),
        lambda: fs.remove(f"{root}/no"),
    ):
        with pytest.raises(FileNotFoundError, match="no"):
            call()


def test_read_stops_soon_after_the_limit(place, monkeypatch):
    fs, root = place
    monkeypatch.setattr(filesystem, "BLOCK_BYTES", 4)
    fs.write(f"{root}/x", [b"0123456789" * 10])
    assert filesystem.read(fs, f"{root}/x", max_bytes=100) == b"0123456789" * 10
    assert filesystem.read(fs, f"{root}/x", max_bytes=9) == b"012345678901"


def test_local_rename_moves_a_directory(tmp_path):
    fs, root = filesystem.for_root(tmp_path)
    assert fs.renames_atomically
    fs.write(f"{root}/a/x", [b"1"])
    fs.rename(f"{root}/a", f"{root}/b")
    assert fs.list_dir(root) == ["b"]
    assert fs.stat(f"{root}/b/x").size == 1


def test_urls_are_never_renamed():
    pytest.importorskip("tensorflow")
    fs, _ = filesystem.for_root("ram://renames")
    assert not fs.renames_atomically
    with pytest.raises(OSError) as caught:
        fs.rename("ram://renames/a", "ram://renames/b")
    assert caught.value.errno == errno.ENOTSUP


def test_links_and_pipes_are_not_followed_locally(tmp_path):
    fs, root = filesystem.for_root(tmp_path)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "file").write_text("secret")
    (tmp_path / "link").symlink_to(tmp_path / "d")
    (tmp_path / "file").symlink_to(tmp_path / "d" / "file")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "file", "dangling", "pipe"):
        assert fs.stat(f"{root}/{name}")[:2] == (False, False)
        with pytest.raises(filesystem.NotRegularFileError):
            list(fs.blocks(f"{root}/{name}"))
    with pytest.raises(filesystem.NotRegularFileError):
        list(fs.blocks(f"{root}/d"))
    with pytest.raises(NotADirectoryError):
        fs.list_dir(f"{root}/link")
    names = [name for name, _ in filesystem.walk(fs, root)]
    assert "link/file" not in names
    assert "d/file" in names
    with pytest.raises(NotADirectoryError):
        list(filesystem.walk(fs, f"{root}/link"))


def test_sync_failures_are_not_hidden(tmp_path, monkeypatch):
    fs, root = filesystem.for_root(tmp_path)
    number = errno.EIO

    def fail(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError):
        fs.sync(root)
    with pytest.raises(OSError):
        fs.write(f"{root}/x", [b"1"])
    number = errno.EINVAL
    fs.sync(root)


def test_roots(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for root in ("here", pathlib.Path("here"), "here/"):
        fs, path = filesystem.for_root(root)
        assert isinstance(fs, filesystem.LocalFileSystem)
        assert path == str(tmp_path / "here")


def test_url_roots_are_kept():
    pytest.importorskip("tensorflow")
    for root in ("ram://a/b", "ram://a/b/", "ram:///a", "gs://bucket/x"):
        fs, path = filesystem.for_root(root)
        assert isinstance(fs, filesystem.GFileSystem)
        assert path == root.rstrip("/")


@pytest.mark.parametrize(
    ("root", "named"),
    [
        ("", "directory or a URL"),
        (None, "None"),
        (b"/tmp", "as text"),
        (7, "7"),
        (pathlib.Path("gs://bucket/x"), "pass a str"),
        ("gs://", "two slashes"),
        ("gs:/bucket", "two slashes"),
        ("nope://bucket/x", "'nope'"),
    ],
)
def test_bad_roots_are_named(root, named):
    if root == "nope://bucket/x":
        pytest.importorskip("tensorflow")
    with pytest.raises(ValueError, match=named):
        filesystem.for_root(root)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
