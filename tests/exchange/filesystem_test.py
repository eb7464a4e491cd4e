"""The file operations of local disks and of URLs."""

import contextlib
import errno
import gc
import multiprocessing
import os
import pathlib
import socket
import sys
import warnings

import pytest

from tests.cases import object_store
from tfdistill.exchange import filesystem


@pytest.fixture(scope="module")
def s3():
    with object_store.serve() as server:
        yield server


@pytest.fixture(params=["local", "memory", "s3", "az"])
def place(request, tmp_path):
    """A file system and an empty directory of it."""
    if request.param == "local":
        return filesystem.for_root(tmp_path)
    if request.param == "az":
        url = object_store.azure_container()
        return filesystem.for_root(f"{url}/{tmp_path.name}")
    if request.param == "s3":
        url = request.getfixturevalue("s3").url
        return filesystem.for_root(f"{url}/{tmp_path.name}")
    return filesystem.for_root(f"memory://{tmp_path.name}")


def _names(fs, path):
    """Returns what is in a directory, which a store has only with its files."""
    try:
        return sorted(fs.list_dir(path))
    except FileNotFoundError:
        assert isinstance(fs, filesystem.ObjectStore)
        return []


def test_what_is_written_is_listed_and_read(place):
    fs, root = place
    fs.write(f"{root}/a/b/file", [b"one", b"", b"two"])
    fs.write(f"{root}/a/empty", [])
    fs.make_dirs(f"{root}/a/c")
    fs.make_dirs(f"{root}/a/c")
    assert fs.list_dir(root) == ["a"]
    made = [] if isinstance(fs, filesystem.ObjectStore) else ["c"]
    assert _names(fs, f"{root}/a") == ["b", *made, "empty"]
    assert b"".join(fs.blocks(f"{root}/a/b/file")) == b"onetwo"
    assert list(fs.blocks(f"{root}/a/empty")) == []
    assert fs.stat(f"{root}/a/b/file")[:3] == (False, True, 6)
    assert fs.stat(f"{root}/a/b")[:2] == (True, False)
    fs.sync(f"{root}/a/b/file")
    fs.sync(f"{root}/a")


def test_a_file_that_is_cut_short_never_appears(place):
    fs, root = place

    def blocks():
        yield b"1"
        raise OSError(errno.EIO, "the disk it is read from")

    if root.startswith("memory"):
        pytest.skip("a part of it appears, as in no real store")
    fs.write(f"{root}/x", [b"before"])
    with pytest.raises(OSError, match="read from"):
        fs.write(f"{root}/x", blocks())
    gc.collect()  # What was opened ends here at the latest.
    assert _names(fs, root) == ["x"]
    assert b"".join(fs.blocks(f"{root}/x")) == b"before"


def test_what_is_absent_is_an_os_error(place):
    fs, root = place
    for call in (
        lambda: fs.list_dir(f"{root}/no"),
        lambda: fs.stat(f"{root}/no"),
        lambda: list(fs.blocks(f"{root}/no")),
        lambda: fs.remove(f"{root}/no"),
        lambda: list(filesystem.walk(fs, f"{root}/no")),
    ):
        with pytest.raises(FileNotFoundError, match="no"):
            call()
    fs.write(f"{root}/file", [b"1"])
    with pytest.raises(OSError):
        fs.list_dir(f"{root}/file")


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


def test_without_the_extra_the_message_says_what_to_install(monkeypatch):
    with pytest.raises(ValueError, match="nope://"):
        filesystem.for_root("nope://bucket/x")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ValueError, match=r"s3.*tfdistill\[cloud\]"):
        filesystem.for_root("s3://bucket/x")


def test_a_store_that_is_gone_is_an_os_error(s3):
    fs, root = filesystem.for_root(f"{s3.url}/gone")
    fs.write(f"{root}/x", [b"1"])
    with s3.stopped():
        for call in (
            lambda: fs.list_dir(root),
            lambda: fs.write(f"{root}/x", [b"1"]),
        ):
            with pytest.raises(OSError, match="EndpointConnectionError"):
                call()
    assert fs.list_dir(root) == ["x"]


def test_a_store_that_never_answers_is_an_os_error(s3, monkeypatch):
    """By the limit of each try, and few of them."""
    bounds = filesystem._BOUNDS["s3"]["config_kwargs"]
    monkeypatch.setitem(bounds, "read_timeout", 0.1)
    with socket.create_server(("127.0.0.1", 0), backlog=100) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        filesystem._connected.cache_clear()
        fs, root = filesystem.for_root(s3.url)
        with pytest.raises(OSError, match="timeout"):
            list(fs.blocks(f"{root}/x"))
        num_tries = 0
        silent.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                silent.accept()[0].close()
                num_tries += 1
    filesystem._connected.cache_clear()
    # A read, and a look at what it is that could not be read.
    assert num_tries == 2 * 2 + 2


def test_a_name_that_looks_like_a_pattern_removes_only_itself(s3):
    fs, root = filesystem.for_root(f"{s3.url}/patterns")
    for name in ("run[1]", "run1", "run*"):
        fs.write(f"{root}/{name}/x", [b"1"])
    fs.remove_tree(f"{root}/run[1]")
    fs.remove_tree(f"{root}/run*")
    assert fs.list_dir(root) == ["run1"]


def test_an_object_that_marks_a_directory_is_not_in_it(s3):
    fs, root = filesystem.for_root(f"{s3.url}/marked")
    s3.put("marked/d/", b"")
    s3.put("marked/d/x", b"1")
    assert fs.list_dir(f"{root}/d") == ["x"]
    assert fs.stat(f"{root}/d").is_dir
    assert [name for name, _ in filesystem.walk(fs, f"{root}/d")] == ["x"]


def test_a_store_can_be_used_after_a_fork(s3):
    fs, root = filesystem.for_root(f"{s3.url}/forked")
    fs.write(f"{root}/x", [b"1"])
    context = multiprocessing.get_context("fork")
    child = context.Process(target=fs.write, args=(f"{root}/y", [b"2"]))
    with warnings.catch_warnings():
        # Of threads that the child will not have.
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    child.join(60)
    assert child.exitcode == 0
    assert fs.list_dir(root) == ["x", "y"]


@pytest.mark.parametrize(
    ("root", "named"),
    [
        ("", "directory or a URL"),
        (None, "None"),
        (pathlib.Path("gs://bucket/x"), "pass a str"),
        ("gs://", "two slashes"),
    ],
)
def test_bad_roots_are_named(root, named):
    with pytest.raises(ValueError, match=named):
        filesystem.for_root(root)
