"""Tests of the doctor's checks that need neither TensorFlow nor processes.

Each is made to fail by the fault itself.
"""

import contextlib
import errno
import json
import os
import pathlib
import re
import socket
import sys
import threading
import time

import pytest

from tests.cases import free_ports
from tests.cases import runs as cases
from tests.cases import storage as storage_cases
from tfdistill.doctor import check
from tfdistill.doctor import command
from tfdistill.doctor import environment
from tfdistill.doctor import examination
from tfdistill.doctor import network
from tfdistill.doctor import storage
from tfdistill.exchange import filesystem
from tfdistill.exchange import signing

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_KEY = "k" * 32


def _faults(results):
    return [r for r in results if r.status in (check.FAILED, check.WARNING)]


def _only(results, status, name):
    """The one result that is not ok, which must be of a status and check."""
    (found,) = [r for r in results if r.status != check.OK]
    assert (found.status, found.name) == (status, name), found
    assert found.remedy or status == check.SKIPPED
    return found


# ---- one check ----


def test_a_fault_without_a_remedy_is_refused():
    with pytest.raises(ValueError, match="must say the remedy"):
        check.failed("x", "y")


def _check(make, limit_secs=30.0):
    return check.Check(
        name="x", limit_secs=limit_secs, make=make, remedy="do this"
    )


def test_a_check_that_hangs_is_given_up_and_what_it_found_is_kept():
    release = threading.Event()

    def make():
        yield check.ok("x", "first")
        release.wait(60)

    results, ended = check.run(_check(make, limit_secs=0.3))
    release.set()
    assert [r.status for r in results] == [check.OK, check.FAILED]
    assert results[1].seen == "it has not ended within 0.3 s"
    assert results[1].remedy == "do this"
    assert not ended


def test_a_check_that_breaks_is_a_failure():
    def make():
        yield check.ok("x", "first")
        raise KeyError("oh\n\x1b[31mno")

    results, ended = check.run(_check(make))
    assert ended
    assert results[1].seen == "KeyError: 'oh\\n\\x1b[31mno'"


# ---- versions ----


def test_the_ranges_are_those_of_the_project():
    found = environment.ranges()
    assert found["python"] == "<3.14,>=3.11"
    assert environment.fits("3.12", found["keras"])
    assert "pytest" not in found


def test_the_ranges_of_an_installed_package(tmp_path):
    class Metadata(dict):
        def get_all(self, name):
            return [
                "keras<3.17,>=3.12",
                "tensorflow<2.22,>=2.20",
                'pytest>=9; extra == "dev"',
            ]

    found = environment.ranges(
        tmp_path / "absent",
        metadata=lambda name: Metadata({"Requires-Python": "<3.14,>=3.11"}),
    )
    assert found == {
        "python": "<3.14,>=3.11",
        "keras": "<3.17,>=3.12",
        "tensorflow": "<2.22,>=2.20",
    }


def test_versions_that_are_wrong_or_missing():
    wanted = {"keras": ">=3.12,<3.17", "rich": ">=13.7", "python": ">=3.11"}
    have = {"keras": "3.9.1", "python": "3.11.2"}
    *faults, good = environment.of_packages(wanted, installed=have.get)
    assert [f.seen for f in faults] == [
        "keras is 3.9.1, and must be >=3.12,<3.17",
        "rich is not installed, and must be >=13.7",
    ]
    assert faults[0].remedy == "pip install 'keras>=3.12,<3.17'"
    assert good.status == check.OK
    assert "python 3.11.2" in good.seen
    assert not _faults(environment.of_packages())


def test_another_backend_of_keras():
    found = environment.of_backend({"KERAS_BACKEND": "jax"})
    assert _only(found, check.FAILED, "versions").seen.startswith(
        "KERAS_BACKEND is 'jax'"
    )
    assert not _faults(environment.of_backend({}))


# ---- environment ----


def _config(task_type="worker", index=0, **spec):
    spec = spec or {"worker": ["a:1", "b:2"]}
    task = {"type": task_type, "index": index}
    return json.dumps({"cluster": spec, "task": task})


@pytest.mark.parametrize(
    ("environ", "seen"),
    [
        ({"TF_CONFIG": "{"}, "TF_CONFIG must be valid JSON"),
        ({"TF_CONFIG": _config(index=7)}, "must be an integer from 0 to 1"),
        ({"TFDISTILL_GRUOP": "1"}, "TFDISTILL_GRUOP is not a variable"),
    ],
)
def test_a_wrong_environment(environ, seen):
    cluster, result = environment.cluster_of(environ)
    assert cluster is None
    assert seen in _only([result], check.FAILED, "environment").seen


def test_a_right_environment_is_told():
    cluster, result = environment.cluster_of(
        {
            "TF_CONFIG": _config(index=1),
            "TFDISTILL_GROUP": "1",
            "TFDISTILL_NUM_GROUPS": "3",
            "TFDISTILL_EXCHANGE": "/hub",
        }
    )
    assert cluster.peers == (0, 2)
    assert result.seen == (
        "group 1 of 3, worker:1 at b:2; its tasks: 2 worker; peers: group 0, "
        "group 2; exchange: /hub"
    )


def _peers(**environ):
    environ = {f"TFDISTILL_{k.upper()}": v for k, v in environ.items()}
    cluster, _ = environment.cluster_of(environ)
    return [r.seen for r in environment.peers(cluster, environ)]


def test_groups_that_could_not_meet():
    (seen,) = _peers(num_groups="2", group="0")
    assert "no exchange" in seen
    (seen,) = _peers(num_groups="2", exchange="/hub")
    assert "every group would be group 0" in seen
    (seen,) = _peers(exchange="/hub")
    assert "learns from nobody" in seen
    assert _peers(num_groups="2", group="0", exchange="/hub") == []
    assert _peers() == []


@pytest.mark.parametrize(
    ("environ", "status", "seen"),
    [
        ({}, check.WARNING, "no key is set"),
        ({"TFDISTILL_EXCHANGE_KEY": "short"}, check.FAILED, "16 to 4096 bytes"),
        (
            {"TFDISTILL_EXCHANGE_KEY_FILE": "/no/such"},
            check.FAILED,
            "No such file",
        ),
        (
            {
                "TFDISTILL_EXCHANGE_KEY": _KEY,
                "TFDISTILL_EXCHANGE_KEY_FILE": "/a",
            },
            check.FAILED,
            "received both",
        ),
    ],
)
def test_the_key(environ, status, seen):
    found = _only(environment.key(environ), status, "key")
    assert seen in found.seen
    assert _KEY not in found.seen + found.remedy


def test_a_good_key_is_not_shown():
    assert _only(environment.key({}, num_groups=1), check.SKIPPED, "key")
    (found,) = environment.key({"TFDISTILL_EXCHANGE_KEY": _KEY})
    assert found.status == check.OK
    assert _KEY not in found.seen


# ---- addresses ----


@contextlib.contextmanager
def _port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def _cluster(*addresses, index=0, **more):
    environ = {"TF_CONFIG": _config(index=index, worker=list(addresses))}
    cluster, result = environment.cluster_of(environ | more)
    assert cluster is not None, result
    return cluster


@contextlib.contextmanager
def _listening(cluster, **options):
    opened, result = network.listen(cluster, **options)
    try:
        yield opened, result
    finally:
        if opened is not None:
            opened.close()


def test_a_free_port_of_this_host():
    with _listening(_cluster(*_addresses(1))) as (_, result):
        assert result.status == check.OK


def test_a_port_that_another_process_holds():
    with _port() as port:
        with _listening(_cluster(f"localhost:{port}")) as (opened, result):
            assert opened is None
            assert "is taken" in _only([result], check.FAILED, "address").seen
            assert "ss -ltnp" in result.remedy


def test_an_address_of_no_host():
    addresses = free_ports.addresses(1, host="no-such-host.invalid")
    with _listening(_cluster(*addresses)) as (_, result):
        found = _only([result], check.FAILED, "address")
    assert "is no known host" in found.seen
    assert "the host that TF_CONFIG names" in found.remedy


def test_an_address_that_leads_to_a_host_with_a_doctor_of_its_own():
    other = network.card_of(_cluster("a:1"), None)

    def ask(responder, address):
        return other

    with _listening(_cluster(*_addresses(1)), ask=ask) as (_, result):
        found = _only([result], check.FAILED, "address")
    assert "is answered by another process, worker:0" in found.seen


def _meet(*clusters, options=(), wait_secs=20.0):
    """Each cluster's task looks for the others, all at the same time."""
    found = {}
    options = options or [{}] * len(clusters)
    responders = [
        network.listen(cluster, **each)[0]
        for cluster, each in zip(clusters, options, strict=True)
    ]
    assert all(responders)

    def look(number):
        found[number] = list(
            network.others(
                clusters[number], responders[number], wait_secs=wait_secs
            )
        )

    threads = [
        threading.Thread(target=look, args=(n,)) for n in range(len(clusters))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for opened in responders:
        opened.close()
    return [found[n] for n in range(len(clusters))]


def _addresses(count):
    return free_ports.addresses(count, host="localhost")


def test_tasks_that_find_each_other():
    spec = _addresses(3)
    results = _meet(*(_cluster(*spec, index=n) for n in range(3)))
    for found in results:
        assert not _faults(found)
    assert results[0][0].seen == "each at its own address: worker:1, worker:2"


def test_a_task_with_another_cluster_is_told_by_all():
    spec = _addresses(3)
    other = _cluster(*spec[:2], index=1)
    results = _meet(_cluster(*spec), other, wait_secs=2.0)
    assert any("another TF_CONFIG" in r.seen for r in results[0])
    assert any("another TF_CONFIG" in r.seen for r in results[1])
    assert any("refuses connections" in r.seen for r in results[0])


@pytest.mark.parametrize(
    ("ours", "theirs", "seen"),
    [
        (b"a" * 16, b"b" * 16, "worker:1 has another key than this task"),
        (b"a" * 16, None, "this task has a key, and worker:1 has none"),
        (None, b"b" * 16, "worker:1 has a key, and this task has none"),
        (None, None, None),
        (b"a" * 16, b"a" * 16, None),
    ],
)
def test_keys_of_two_tasks(ours, theirs, seen):
    spec = _addresses(2)
    options = [
        {"signer": signing.Signer(key) if key else None}
        for key in (ours, theirs)
    ]
    results = _meet(_cluster(*spec), _cluster(*spec, index=1), options=options)
    found = [r.seen for r in _faults(results[0])]
    assert found == ([seen] if seen else [])


def test_a_clock_that_differs():
    spec = _addresses(2)
    late = {"clock": lambda: time.time() - 90}
    results = _meet(
        _cluster(*spec), _cluster(*spec, index=1), options=[{}, late]
    )
    found = _only(results[0], check.WARNING, "clock")
    assert re.search(
        "worker:1 differs from this one by -(89|90|91) s", found.seen
    )
    found = _only(results[1], check.WARNING, "clock")
    assert re.search(r"worker:0 differs .* by \+(89|90|91) s", found.seen)


def test_two_tasks_with_swapped_addresses_are_told():
    one, two = _addresses(2)
    results = _meet(_cluster(one, two), _cluster(two, one), wait_secs=2.0)
    for found, address in zip(results, (two, one), strict=True):
        assert _only(found, check.FAILED, "reach").seen == (
            f"{address}, the address of worker:1, is answered by worker:0"
        )


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n\n",
        b"[" * 4095 + b"\n",
        b'{"tfdistill_doctor": 1}\n',
    ],
    ids=["http", "deep", "older"],
)
def test_what_is_no_doctor_is_told_apart(answer):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

        def reply():
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(answer)

        threading.Thread(target=reply, daemon=True).start()
        cluster = _cluster(*_addresses(1), address)
        with _listening(cluster) as (opened, _):
            with pytest.raises(network.NoAnswerError, match="not the doctor"):
                opened.ask(address)


# ---- storage ----


def test_an_exchange_that_works_is_left_as_it_was(tmp_path):
    assert not _faults(storage.exchange(str(tmp_path / "hub")))
    assert os.listdir(tmp_path / "hub") == []


def test_a_file_in_the_place_of_the_exchange(tmp_path):
    (tmp_path / "hub").touch()
    results = storage.exchange(str(tmp_path / "hub"))
    found = _only(results, check.FAILED, "exchange")
    assert "could not make a directory" in found.seen
    assert "mkdir" in found.remedy


def test_an_exchange_without_a_rename_is_fine(tmp_path):
    mount = storage_cases.NoDirectoryRename()
    found = list(storage.exchange(str(tmp_path), file_system=mount))
    assert not _faults(found)
    assert "no rename of directories" in found[0].seen


class _Forgetful(filesystem.LocalFileSystem):
    """A mount that fails in one way."""

    def __init__(self, fault):
        self.fault = fault

    def list_dir(self, path):
        return [] if self.fault == "list" else super().list_dir(path)

    def blocks(self, path):
        return iter([b"x"] if self.fault == "read" else super().blocks(path))

    def remove_tree(self, path):
        if self.fault == "remove":
            raise OSError(errno.EPERM, "Operation not permitted", path)
        super().remove_tree(path)

    def rename(self, source, target):
        if self.fault == "rename":
            raise OSError(errno.EACCES, "Permission denied", source)
        super().rename(source, target)

    def write(self, path, blocks):
        if self.fault == "write":
            raise OSError(errno.ENOSPC, "No space left on device", path)
        super().write(path, blocks)


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        ("list", "could not list: it shows []"),
        ("read", "could not read back: 1 different bytes"),
        ("remove", "could not remove"),
        ("rename", "could not rename"),
        ("write", "No space left on device"),
    ],
)
def test_an_exchange_that_fails_in_one_way(tmp_path, fault, seen):
    found = _only(
        storage.exchange(str(tmp_path), file_system=_Forgetful(fault)),
        check.FAILED,
        "exchange",
    )
    assert seen in found.seen
    if fault != "remove":
        assert os.listdir(tmp_path) == []


def test_an_object_store_and_an_unknown_scheme():
    store = storage_cases.MemoryFileSystem()
    assert not _faults(storage.exchange("m", file_system=store))
    assert store.files == {}
    found = _only(storage.exchange("nearly:/x"), check.FAILED, "exchange")
    assert "two slashes" in found.seen


def test_a_clock_other_than_the_storages(tmp_path):
    found = list(storage.exchange(str(tmp_path), clock=lambda: 5.0))
    assert _only(found, check.WARNING, "clock")
    cases.version(tmp_path, 0, 7)
    (bad, good) = storage.clocks(str(tmp_path), 2)
    assert "group 0 published version 7" in bad.seen
    assert good.status == check.OK
    (found,) = storage.clocks(str(tmp_path / "empty"), 2)
    assert found.status == check.SKIPPED


@pytest.mark.parametrize(
    ("free", "status"),
    [(10**12, check.OK), (10**8, check.WARNING), (10**5, check.FAILED)],
)
def test_room_on_the_disk(tmp_path, free, status):
    path = str(tmp_path / "not" / "yet")
    found = storage.space(path, name="exchange", free_bytes=lambda path: free)
    assert found.status == status
    assert not _faults([storage.space(path, name="exchange")])


def test_room_for_versions_of_the_size_that_is_there(tmp_path):
    cases.version(tmp_path, 1, 7, num_bytes=10**10)
    for free, status in ((6, check.OK), (4, check.WARNING), (1, check.FAILED)):
        found = storage.space(
            str(tmp_path),
            name="exchange",
            num_groups=2,
            free_bytes=lambda path, free=free: free * 10**10 - 1,
        )
        assert found.status == status


# ---- the whole, and what is said of it ----


def _examine(monkeypatch, environ, **options):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    options = examination.Options(tensorflow=False, **options)
    return [result for result, _ in examination.examine(options)]


def test_one_task_on_its_own(monkeypatch, tmp_path):
    found = _examine(monkeypatch, {"TFDISTILL_WORKDIR": str(tmp_path)})
    assert not _faults(found)
    names = {r.name for r in found if r.status == check.SKIPPED}
    assert {"address", "key", "reach"} <= names


def test_a_wrong_environment_ends_the_examination(monkeypatch):
    found = _examine(monkeypatch, {"TF_CONFIG": "{"})
    assert "environment" in [r.name for r in _faults(found)]
    assert found[-1].status == check.SKIPPED


def test_the_command_says_all_in_json(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TFDISTILL_WORKDIR", str(tmp_path / "file"))
    code = command.main(["--json", "--no_tensorflow"])
    found = json.loads(capsys.readouterr().out)
    assert code == 1
    assert found["failed"] == 2  # The exchange lies in the workdir.
    text = (_ROOT / "docs" / "doctor.md").read_text("utf-8")
    for key in (*found, *found["results"][0]):
        assert f"`{key}`" in text
    for result in found["results"]:
        assert f"| `{result['name']}` |" in text


def test_the_command_for_people(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("TFDISTILL_WORKDIR", str(tmp_path))
    monkeypatch.setenv("TFDISTILL_NUM_GROUPS", "2")
    monkeypatch.setenv("TFDISTILL_GROUP", "0")
    assert command.main(["--no_tensorflow", "--plain"]) == 0
    out = capsys.readouterr().out
    assert "ok       workdir: " in out
    assert "remedy: export TFDISTILL_EXCHANGE_KEY_FILE" in out
    assert out.splitlines()[-1].endswith("0 failed, 3 skipped")


@pytest.mark.parametrize(
    "arguments", [["--wait_secs=0"], ["--limit_secs=nan"], ["x"]]
)
def test_wrong_options(arguments):
    with pytest.raises(SystemExit) as raised:
        command.main(arguments)
    assert raised.value.code == 2


def test_a_check_that_hangs_does_not_keep_the_process():
    codes = []
    assert command.leave(1, False, exit_now=codes.append) == 1
    assert command.leave(0, True, exit_now=codes.append) == 0
    assert codes == [1]


def test_text_of_others_cannot_steer_the_terminal(capsys):
    bad = "\x1b]0;x\x07[bold]y[/bold][/z]\nnext"
    told = command.Report(sys.stdout)
    told.add(check.failed("x", bad, bad))
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x07" not in out
    assert "[bold]y[/bold][/z] next" in out


def test_the_documentation_lists_every_check():
    text = (_ROOT / "docs" / "doctor.md").read_text("utf-8")
    source = "".join(
        path.read_text("utf-8")
        for path in (_ROOT / "tfdistill" / "doctor").glob("*.py")
    )
    names = set(re.findall(r'^[A-Z]+ = "([a-z]+)"$', source, re.MULTILINE))
    assert {"address", "data", "exchange", "key", "teachers"} <= names
    listed = set(re.findall(r"^\| `([a-z]+)` \|", text, re.MULTILINE))
    assert names <= listed, names - listed
