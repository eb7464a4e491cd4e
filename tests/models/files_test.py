"""Tests of forms that are made once: by whom, when, and what is left."""

import fcntl
import json
import multiprocessing
import os
import signal
import time

import pytest

from models import files as data_files


def fill(directory, text="whole"):
    (directory / "file").write_text(text)


def test_the_first_of_two_machines_wins(tmp_path):
    final = tmp_path / "made"

    def make(aside):
        # Another machine, whose lock is not seen here.
        final.mkdir()
        fill(final, "theirs")
        fill(aside, "ours")

    assert data_files.made_once(final, make) == final
    assert (final / "file").read_text() == "theirs"
    assert [path.name for path in tmp_path.glob("*")] != []
    assert not list(tmp_path.glob(".tmp-*"))


def test_waiting_has_a_bound_and_is_reported(tmp_path, capfd):
    final = tmp_path / "made"
    with (tmp_path / ".lock-made").open("a+") as held:
        fcntl.flock(held.fileno(), fcntl.LOCK_EX)
        with pytest.raises(RuntimeError, match="has been converting .*lock"):
            data_files.made_once(final, fill, wait_secs=0.3)
    assert "waiting for another process" in capfd.readouterr().err
    data_files.made_once(final, fill)
    assert final.is_dir()


def make(root, source):
    return data_files.open_or_make(
        "text",
        lambda: {"version": 1, "source": source.read_text()},
        lambda aside: {"found": fill(aside)},
        root=root,
    )


def test_a_form_has_a_header_and_another_source_makes_another(tmp_path):
    source = tmp_path / "source"
    source.write_text("a")
    first = make(tmp_path / "cache", source)
    assert first.name.startswith("text-")
    assert data_files.read_header(first) == {
        "found": None,
        "source": "a",
        "version": 1,
    }
    assert make(tmp_path / "cache", source) == first
    source.write_text("b")
    assert make(tmp_path / "cache", source) != first


def test_a_source_that_changes_meanwhile_leaves_nothing(tmp_path):
    states = iter([{"bytes": 1}, {"bytes": 2}])
    with pytest.raises(RuntimeError, match="text data changed while they were"):
        data_files.open_or_make(
            "text",
            lambda: next(states),
            lambda aside: {"found": fill(aside)},
            root=tmp_path,
        )
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_a_header_is_written_last(tmp_path):
    def fail(aside):
        fill(aside)
        assert not list(aside.glob("header.json"))
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        data_files.open_or_make("text", dict, fail, root=tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    made = data_files.open_or_make(
        "text", dict, lambda aside: {}, root=tmp_path
    )
    assert json.loads((made / "header.json").read_text()) == {}


@pytest.mark.multiprocess
@pytest.mark.usefixtures("no_process_left")
def test_what_a_killed_process_left_is_made_again_and_shared(tmp_path):
    """One maker is killed; of two at once, one makes it for both."""

    def maker(what):
        process = multiprocessing.get_context("fork").Process(
            target=_make, args=(what, tmp_path)
        )
        process.start()
        return process

    killed = maker("killed")
    killed.join(60)
    assert killed.exitcode == -signal.SIGKILL
    (left,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert left.name.startswith(".tmp-")
    whole = [maker("whole") for _ in range(2)]
    for process in whole:
        process.join(60)
    assert [process.exitcode for process in whole] == [0, 0]
    (made,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert made != left
    assert int((made / "by").read_text()) in {p.pid for p in whole}


def _make(what, root):
    def make(aside):
        (aside / "by").write_text(str(os.getpid()))
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.3)
        return {}

    data_files.open_or_make("text", dict, make, root=root)
