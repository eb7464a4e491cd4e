"""One process at a time publishes for a group."""

import errno
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.cases import storage as storage_cases
from tfdistill.exchange import claim as group_claim
from tfdistill.exchange import filesystem
from tfdistill.exchange import publisher
from tfdistill.exchange import versions

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_WAIT_SECS = 60.0


def _write(directory):
    pathlib.Path(directory, "x").write_text("y")


def _publish(hub, step):
    return hub.publish(_write, group=0, step=step)


def _owner(root):
    return pathlib.Path(root, "group_0", "owner.json")


def test_the_owner_is_named_until_the_group_is_given_up(tmp_path, caplog):
    hub = publisher.Exchange(tmp_path)
    with hub.claim(0, run="/runs/a") as claim:
        assert json.loads(_owner(tmp_path).read_text())["fields"] == {
            "run": "/runs/a",
            "incarnation": hub.incarnation,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        assert hub.claim(0, run="/runs/a") is claim
        # Whoever removed it did not mean a process at work.
        shutil.rmtree(_owner(tmp_path).parent)
        claim.confirm()
        assert _owner(tmp_path).exists()
        assert f"{_owner(tmp_path)} was deleted, perhaps with versions" in (
            caplog.text
        )
    assert not _owner(tmp_path).exists() and not claim.is_held
    with pytest.raises(versions.ExportError, match="root=None"):
        publisher.Exchange(None).claim(0)


def test_another_run_is_refused_until_this_one_is_over(tmp_path):
    first = publisher.Exchange(tmp_path)
    with first.claim(0, run="/runs/a") as claim:
        with pytest.raises(group_claim.GroupClaimedError) as caught:
            publisher.Exchange(tmp_path).claim(0, run="/runs/b")
        for word in (
            f"process {os.getpid()} on host {socket.gethostname()!r} of run "
            "'/runs/a'",
            "'/runs/b'",
            "TFDISTILL_EXCHANGE",
            f"remove {_owner(tmp_path)}",
        ):
            assert word in str(caught.value)
        claim.confirm()
        _publish(first, 1)
    publisher.Exchange(tmp_path).claim(0, run="/runs/b").confirm()


@pytest.mark.parametrize("when", ["before", "writing", "committing"])
@pytest.mark.parametrize(
    "kind", [filesystem.LocalFileSystem, storage_cases.NoDirectoryRename]
)
def test_a_newer_process_of_the_run_takes_over_at_once(tmp_path, kind, when):
    """The older one puts nothing into sight, whatever it was at."""

    class Storage(kind):
        on_write = staticmethod(lambda path: None)

        def write(self, path, blocks):
            self.on_write(path)
            super().write(path, blocks)

    storage = Storage()
    old = publisher.Exchange(str(tmp_path), file_system=storage)
    new = publisher.Exchange(tmp_path)
    claim = old.claim(0)
    _publish(old, 1)

    def take_over(path=".tmp-2-"):
        if "/2/" in path or ".tmp-2-" in path:
            storage.on_write = lambda path: None
            new.claim(0)
            _publish(new, 5)

    def write(directory):
        if when == "writing":
            take_over()
        elif when == "committing":
            storage.on_write = take_over
        _write(directory)

    if when == "before":
        take_over()
    with pytest.raises(group_claim.ClaimLostError, match="has taken over"):
        old.publish(write, group=0, step=2)
    with pytest.raises(group_claim.ClaimLostError):
        claim.check()
    claim.release()
    with pytest.raises(group_claim.ClaimLostError):
        _publish(old, 7)
    assert new.steps(0) == [1, 5]
    new.verify(new.open(0, 5))
    # And does not take the group back, nor its owner's name away.
    _publish(new, 6)


def test_who_has_no_key_ends_no_group(tmp_path):
    hub = publisher.Exchange(tmp_path, key=b"k" * 16)
    with hub.claim(0) as claim:
        for text in (b"", b"{", b"\xff", b'{"fields": {"run": "x"}}'):
            _owner(tmp_path).write_bytes(text)
            claim.confirm()
        # Not even by what this run has said of another group.
        hub.claim(1)
        other = tmp_path / "group_1" / "owner.json"
        _owner(tmp_path).write_bytes(other.read_bytes())
        claim.confirm()
        # Another key is another run.
        stranger = publisher.Exchange(tmp_path, key=b"x" * 16)
        with pytest.raises(ValueError, match="belongs to another run"):
            stranger.claim(0)


@pytest.mark.parametrize("text", [b"[]", b"\xff"])
def test_what_names_nobody_is_to_be_removed(tmp_path, text):
    _owner(tmp_path).parent.mkdir()
    _owner(tmp_path).write_bytes(text)
    hub = publisher.Exchange(tmp_path)
    with pytest.raises(ValueError, match=f"remove {_owner(tmp_path)}"):
        hub.claim(0)
    _owner(tmp_path).unlink()
    hub.claim(0).confirm()


def test_a_claim_waits_for_storage_that_fails(tmp_path, caplog):
    storage = storage_cases.Faults(filesystem.LocalFileSystem())
    storage.hidden = {str(tmp_path): errno.EIO}
    hub = publisher.Exchange(str(tmp_path), file_system=storage)
    claim = hub.claim(0, run="/runs/a")
    assert "Input/output error" in caplog.text and not claim.is_held
    with pytest.raises(versions.ExportError, match="Input/output error"):
        _publish(hub, 1)
    storage.hidden = {}
    _publish(hub, 2)
    assert claim.is_held
    storage.hidden = {str(tmp_path): errno.EIO}
    with pytest.raises(versions.ExportError, match="Input/output error"):
        _publish(hub, 3)
    claim.check()


class _Process:
    def __init__(self, root, run):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.programs.claim", str(root), run],
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
        )
        self.pid = self.process.pid
        self.incarnation = self.next("start")["incarnation"]

    def next(self, name):
        for line in self.process.stdout:
            event = json.loads(line)
            if event["event"] == name:
                return event
        raise AssertionError(f"no {name}")

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def start(no_process_left):
    processes = []

    def begin(root, run="a"):
        processes.append(_Process(root, run))
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()


@pytest.mark.multiprocess
def test_processes_that_are_killed_and_frozen_give_way(tmp_path, start):
    """In an object store: tests/runs/object_store_test.py kills writers."""
    root = tmp_path
    first = start(root)
    first.next("published")
    second = start(root, "b")
    assert str(first.pid) in second.next("refused")["message"]
    assert second.process.wait() == 2
    first.kill()
    third = start(root)
    third.next("published")
    os.kill(third.pid, signal.SIGSTOP)
    fourth = start(root)
    fourth.next("published")
    time.sleep(0.2)
    os.kill(third.pid, signal.SIGCONT)
    assert str(fourth.pid) in third.next("lost")["message"]
    assert third.process.wait() == 3
    for _ in range(3):
        fourth.next("published")
    fourth.kill()
    hub, found = publisher.Exchange(root), []
    for step in hub.steps(0):
        version = hub.open(0, step)
        hub.verify(version)
        found.append(version.manifest.incarnation)
    assert list(dict.fromkeys(found)) == [
        process.incarnation for process in (first, third, fourth)
    ]
