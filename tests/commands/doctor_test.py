"""Tests of the doctor and its checks that need no TensorFlow.

Each is made to fail by the fault itself.
"""

import concurrent.futures
import errno
import json
import os
import socket
import subprocess
import sys

import pytest

from tests.cases import free_ports
from tests.cases import runs
from tests.cases import storage as storage_cases
from tfdistill.cluster import identity
from tfdistill.commands import doctor as command
from tfdistill.doctor import checks
from tfdistill.exchange import filesystem

_KEY = "k" * 32


def _only(results, status, name):
    """The one result that is not ok, which must be of a status and check."""
    (found,) = [r for r in results if r.status != checks.OK]
    assert (found.status, found.name) == (status, name), found
    assert found.remedy or status == checks.SKIPPED
    return found


_HANGS = """
import threading
from tfdistill.doctor import checks

def make():
    yield checks.ok("x", "first")
    threading.Event().wait()

for result in checks.run(checks.Check("x", make, 0.3, "do this")):
    checks.show(result)
"""


def test_a_check_that_hangs_ends_the_process_after_what_it_found():
    done = subprocess.run(
        [sys.executable, "-c", _HANGS],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "ok       x: first",
        "failed   x: did not finish within 0.3 s",
        "         remedy: do this",
    ]


def test_a_check_that_breaks_has_found_a_fault():
    def make():
        yield checks.ok("x", "first")
        raise KeyError("y")

    results = list(checks.run(checks.Check("x", make, 60.0, "do this")))
    assert [r.status for r in results] == [checks.OK, checks.FAILED]
    assert results[1].seen == "KeyError: 'y'"


_TASK_7 = json.dumps(
    {
        "cluster": {"worker": ["a:1", "b:2"]},
        "task": {"type": "worker", "index": 7},
    }
)


@pytest.mark.parametrize(
    ("name", "value", "seen"),
    [
        ("TF_CONFIG", "{", "TF_CONFIG must be valid JSON"),
        ("TF_CONFIG", _TASK_7, "be one of worker:0, worker:1"),
        ("TFDISTILL_GRUOP", "1", "TFDISTILL_GRUOP is not a variable"),
    ],
)
def test_a_wrong_environment(name, value, seen):
    cluster, results = checks.cluster_of({name: value})
    assert cluster is None
    assert seen in _only(results, checks.FAILED, "environment").seen


def _environment(**environ):
    _, results = checks.cluster_of(
        {f"TFDISTILL_{k.upper()}": v for k, v in environ.items()}
    )
    assert not any(_KEY in found.seen + found.remedy for found in results)
    return [(found.name, found.status) for found in results[1:]]


def test_groups_that_could_not_meet_and_keys():
    bad = ("environment", "failed")
    two = {"num_groups": "2", "group": "0"}
    assert _environment(exchange_key=_KEY, **two) == [bad, ("key", "ok")]
    missing = {"exchange_key_file": "/no/such", "exchange": "/hub"}
    assert _environment(**missing, **two) == [("key", "failed")]
    assert _environment(num_groups="2", exchange="/hub") == [
        bad,
        ("key", "warning"),
    ]
    assert _environment() == [("key", "skipped")]


def _cluster(*addresses, index=0):
    return identity.Cluster(task_index=index, spec={"worker": addresses})


def _reach(*clusters, wait_secs=20.0):
    """Each cluster's task looks for the others, all at the same time."""

    def examine(cluster):
        return list(checks.of_group(cluster, wait_secs=wait_secs))

    with concurrent.futures.ThreadPoolExecutor(len(clusters)) as pool:
        return list(pool.map(examine, clusters))


def test_a_port_that_another_process_holds():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        (found,) = _reach(_cluster(f"localhost:{port}"))
    assert "Address already in use" in _only(found, "failed", "address").seen
    assert "ss -ltnp" in found[0].remedy
    (found,) = _reach(_cluster(f"localhost:{port}"))
    assert "single task" in _only(found, checks.SKIPPED, "reach").seen


def test_a_task_that_is_missing_is_named_by_each():
    one, two, three = free_ports.addresses(3)
    spec = one, two, three
    first, second = _reach(
        _cluster(*spec), _cluster(*spec, index=1), wait_secs=1.0
    )
    assert [result.seen for result in first if result.status == "failed"] == [
        "worker:0 waited 1 s for worker:2, which did not connect.",
        f"worker:0 waited 1 s for worker:2 at {three}: no task answers there.",
    ]
    assert first[-1].seen.endswith("work at worker:1")
    assert second[-1].seen.endswith("work at worker:0")


def test_two_tasks_with_swapped_addresses_are_told():
    one, two = free_ports.addresses(2)
    clusters = _cluster(one, two), _cluster(two, one)
    for found, address in zip(
        _reach(*clusters, wait_secs=1.0), (two, one), strict=True
    ):
        assert any(
            result.seen.startswith(f"worker:1 at {address} refused worker:0: ")
            for result in found
        )


def test_an_exchange_that_works_is_left_as_it_was(tmp_path):
    missing = checks.of_root(str(tmp_path / "hub" / "deep"))
    assert missing.status == checks.OK
    assert f"which a run will create in {tmp_path}: wrote, " in missing.seen
    assert os.listdir(tmp_path) == []
    mount = storage_cases.NoDirectoryRename()
    assert checks.of_root(str(tmp_path), file_system=mount).status == checks.OK
    store = storage_cases.MemoryFileSystem()
    assert checks.of_root("m", file_system=store).status == checks.OK
    assert store.files == {}


def test_a_file_in_the_place_of_the_exchange(tmp_path):
    (tmp_path / "hub").touch()
    found = checks.of_root(str(tmp_path / "hub"))
    assert found.status == checks.FAILED
    assert "could not make a directory" in found.seen
    assert "mkdir" in found.remedy
    assert "two slashes" in checks.of_root("nearly:/x").seen


class _Forgetful(filesystem.LocalFileSystem):
    """A mount that fails in one way."""

    def __init__(self, fault):
        self.fault = fault

    def list_dir(self, path):
        return [] if self.fault == "list" else super().list_dir(path)

    def move(self, source, target):
        if self.fault == "rename":
            raise OSError(errno.EACCES, "Permission denied", source)
        return super().move(source, target)

    def write(self, path, blocks):
        if self.fault == "write":
            raise OSError(errno.ENOSPC, "No space left on device", path)
        super().write(path, blocks)


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        ("list", "could not list: it lists []"),
        ("rename", "could not rename"),
        ("write", "No space left on device"),
    ],
)
def test_an_exchange_that_fails_in_one_way(tmp_path, fault, seen):
    found = checks.of_root(str(tmp_path), file_system=_Forgetful(fault))
    assert found.status == checks.FAILED
    assert seen in found.seen
    assert os.listdir(tmp_path) == []


def test_the_command_for_people(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("TFDISTILL_WORKDIR", str(tmp_path))
    monkeypatch.setenv("TFDISTILL_NUM_GROUPS", "2")
    monkeypatch.setenv("TFDISTILL_GROUP", "0")
    assert command.main(["--no_tensorflow"]) == 0
    out = capsys.readouterr().out
    assert "ok       workdir: " in out
    assert "remedy: export TFDISTILL_EXCHANGE_KEY_FILE" in out
    assert out.splitlines()[-1] == "3 ok, 1 warning, 0 failed, 1 skipped"
    (tmp_path / "file").touch()
    monkeypatch.setenv("TFDISTILL_WORKDIR", str(tmp_path / "file"))
    assert command.main(["--no_tensorflow"]) == 1
    # The exchange lies in the workdir.
    assert "1 warning, 2 failed" in capsys.readouterr().out
    monkeypatch.setenv("TF_CONFIG", "{")
    assert command.main(["--no_tensorflow"]) == 1


def test_a_slow_worker_of_the_run_so_far(tmp_path):
    cluster = identity.Cluster(workdir=str(tmp_path))
    for slow in ["worker:1 is slow"], []:
        runs.metrics(tmp_path, 0, {"slow_workers": slow})
        found = [each.seen for each in checks.of_workers(cluster)]
        assert found == slow


def test_text_of_others_cannot_steer_the_terminal(capsys):
    bad = "\x1b]0;x\x07[bold]y[/bold][/z]\nnext"
    checks.show(checks.failed("x", bad, bad))
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x07" not in out
    assert "[bold]y[/bold][/z] next" in out
