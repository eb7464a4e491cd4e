"""Files that appear whole: written, replaced, left alone by a failure."""

import errno
import os
import threading

import pytest

from tfdistill.system import run_files


def test_a_reader_sees_one_or_the_other(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    path = tmp_path / "x"
    contents = [b"a" * 100_000, b"b" * 50_000]
    path.write_bytes(contents[0])
    stop, seen = threading.Event(), set()

    def read():
        while not stop.is_set():
            seen.add(path.read_bytes())

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    for i in range(200):
        run_files.write(str(path), [contents[i % 2]])
    stop.set()
    thread.join(60)
    assert seen <= set(contents)


def test_a_failure_leaves_what_was_there(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"old")

    def blocks():
        yield b"new"
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        run_files.write(str(path), blocks())
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]
    (tmp_path / "directory").mkdir()
    with pytest.raises(IsADirectoryError):
        run_files.write(str(tmp_path / "directory"), [b"x"])
