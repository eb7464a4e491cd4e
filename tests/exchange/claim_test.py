"""One process at a time publishes for a group."""

import dataclasses
import errno
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.cases import object_store
from tests.cases import storage as storage_cases
from tfdistill.exchange import claim as group_claim
from tfdistill.exchange import filesystem
from tfdistill.exchange import publisher
from tfdistill.exchange import signing
from tfdistill.exchange import versions
from tfdistill.system import processes


class _Store(filesystem.LocalFileSystem):
    """Storage where nothing can be renamed, as behind a URL."""

    renames_atomically = False

    def rename(self, source, target):
        raise OSError(errno.ENOTSUP, "no rename", source)


def _record(incarnation="a", **changes):
    fields = dict(
        incarnation=incarnation,
        host="there",
        pid=1234,
        machine="elsewhere",
        started=5,
    )
    return group_claim.ClaimRecord(**{**fields, **changes})


@pytest.fixture(params=["renames", "no_directories", "store"])
def files(request, tmp_path):
    storage = {
        "renames": filesystem.LocalFileSystem,
        "no_directories": storage_cases.NoDirectoryRename,
        "store": _Store,
    }[request.param]
    return group_claim.ClaimFiles(storage(), f"{tmp_path}/group_0")


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


def test_a_claim_is_made_once(files, tmp_path, request):
    assert files.create(1, _record("a"))
    assert files.creates_exclusively == ("[renames]" in request.node.name)
    assert not files.create(1, _record("b"))
    assert files.newest().record == _record("a")
    assert os.listdir(tmp_path / "group_0") == [".claim-1"]


def test_a_claim_is_replaced_as_a_whole(files, tmp_path):
    files.create(1, _record())
    changed = _record(counter=3, released=True)
    files.write(1, changed)
    assert files.read(1).record == changed
    assert os.listdir(tmp_path / "group_0/.claim-1") == ["owner.json"]


def test_a_claim_that_is_being_written_counts(files, tmp_path):
    os.makedirs(tmp_path / "group_0/.claim-4")
    assert files.newest() == group_claim.Claim(4, b"", None)


def test_other_failures_are_not_taken_for_a_faster_process(tmp_path):
    class ReadOnly(filesystem.LocalFileSystem):
        def rename(self, source, target):
            raise OSError(errno.EROFS, "Read-only file system", target)

    files = group_claim.ClaimFiles(ReadOnly(), str(tmp_path))
    with pytest.raises(OSError, match="Read-only"):
        files.create(1, _record())
    assert os.listdir(tmp_path) == []


_WAIT_SECS = 60.0


def _own():
    return group_claim.ClaimRecord.of_this_process("a1")


def test_a_record_survives_as_text():
    record = dataclasses.replace(_own(), counter=7, released=True)
    text = record.to_json().encode()
    assert len(text) < group_claim.MAX_BYTES
    assert group_claim.ClaimRecord.from_json(text) == record
    for named in (str(os.getpid()), record.host, "a1"):
        assert named in str(record)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pid", 0),
        ("pid", -1),
        ("pid", 2**31),
        ("pid", True),
        ("pid", "1"),
        ("host", "a\nb"),
        ("host", "a" * 256),
        ("host", None),
        ("incarnation", ""),
        ("incarnation", "../x"),
        ("machine", 3),
        ("counter", -1),
        ("started", 1.5),
        ("released", 1),
        ("more", 1),
    ],
)
def test_what_could_mislead_is_no_record(field, value):
    fields = {**dataclasses.asdict(_own()), field: value}
    assert group_claim.ClaimRecord.from_json(json.dumps(fields)) is None


def test_a_torn_record_is_none():
    text = _own().to_json().encode()
    for length in range(len(text) - 2):
        assert group_claim.ClaimRecord.from_json(text[:length]) is None
    assert group_claim.ClaimRecord.from_json(b"[" * 100_000) is None


@hypothesis.given(st.binary(max_size=300))
def test_any_bytes_are_a_record_or_none(text):
    found = group_claim.ClaimRecord.from_json(text)
    assert found is None or isinstance(found, group_claim.ClaimRecord)


def test_a_name_of_a_host_is_made_fit(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "a b\nc" * 100)
    record = _own()
    assert group_claim.ClaimRecord.from_json(record.to_json()) == record


def test_a_living_process_is_not_gone_and_a_dead_one_is():
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE
    ) as child:
        record = dataclasses.replace(
            _own(), pid=child.pid, started=processes.started(child.pid)
        )
        assert not record.is_gone()
        child.send_signal(signal.SIGSTOP)
        assert not record.is_gone()
        # Another process has the number by now.
        later = dataclasses.replace(record, started=record.started + 1)
        assert later.is_gone()
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        # Not waited for: it still has an entry, as a zombie.
        assert record.is_gone()
        child.wait(_WAIT_SECS)
    assert record.is_gone()


def test_nothing_is_known_of_other_machines(monkeypatch):
    dead = dataclasses.replace(_own(), pid=2**31 - 1)
    assert dead.is_gone()
    assert not dataclasses.replace(dead, machine="other").is_gone()
    assert dataclasses.replace(dead, machine="other", released=True).is_gone()
    # Where the system does not tell, every process is another machine's.
    monkeypatch.setattr(processes, "machine", lambda: "")
    assert not dataclasses.replace(dead, machine="").is_gone()


def test_processes_that_are_hidden_count_as_living(monkeypatch):
    """As under /proc with hidepid, for processes of other users."""
    record = dataclasses.replace(_own(), pid=os.getppid(), started=1)
    assert record.is_gone()
    monkeypatch.setattr(processes, "status_of", lambda pid: None)
    assert not record.is_gone()


def test_this_process_does_not_stand_in_its_own_way():
    assert _own().is_gone()


_PROGRAM = str(pathlib.Path(__file__).parents[1] / "programs" / "claim.py")
_ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def _claim(directory, incarnation, *, file_system=None, **options):
    return group_claim.GroupClaim(
        file_system or filesystem.LocalFileSystem(),
        str(directory),
        owner=_record(incarnation),
        **{"lease_secs": 0.6, "renew_secs": 0.05, **options},
    )


def _until(condition):
    deadline = time.monotonic() + _WAIT_SECS
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.01)


def _freeze(claim):
    """Stops the signs of life, as if the process had been stopped."""
    claim._renew = lambda: None


# ---- in one process ----


def test_a_claim_is_renewed_and_released(tmp_path):
    with _claim(tmp_path, "a") as claim:
        claim.start()
        file = tmp_path / ".claim-1" / "owner.json"
        first = file.read_text()
        _until(lambda: file.read_text() != first)
        claim.confirm()
        assert claim.is_active
    assert json.loads(file.read_text())["released"] is True
    assert not claim.is_active
    # At once: the lease would be longer than the test.
    with _claim(tmp_path, "b", lease_secs=1e6) as after:
        after.start()
        after.confirm()


def test_a_second_claimant_fails_and_names_the_first(tmp_path):
    with _claim(tmp_path, "a") as first:
        first.start()
        second = _claim(tmp_path, "b", lease_secs=1e6)
        with pytest.raises(group_claim.GroupClaimedError) as caught:
            second.start()
        assert isinstance(caught.value, ValueError)
        for told in ("1234", "'there'", "incarnation a", "TFDISTILL_GROUP"):
            assert told in str(caught.value)
        second.release()
        first.confirm()


def test_a_last_sign_of_life_is_not_life(tmp_path, monkeypatch):
    """The owner's last renewal may come into sight after it has died."""
    dead = _claim(tmp_path, "a")
    dead.start()
    _freeze(dead)
    looks = []
    read = filesystem.LocalFileSystem.list_dir

    def list_dir(self, path):
        looks.append(path)
        if len(looks) == 3:
            group_claim.GroupClaim._renew(dead)
        return read(self, path)

    monkeypatch.setattr(filesystem.LocalFileSystem, "list_dir", list_dir)
    with _claim(tmp_path, "b") as claim:
        claim.start()
        claim.confirm()


def test_a_frozen_owner_finds_out_and_stays_out(tmp_path, caplog):
    frozen = _claim(tmp_path, "a")
    frozen.start()
    _freeze(frozen)
    with _claim(tmp_path, "b") as claim:
        claim.start()
        claim.confirm()
        for _ in range(2):
            with pytest.raises(
                group_claim.ClaimLostError, match="incarnation b"
            ):
                frozen.confirm()
        with pytest.raises(RuntimeError, match="'there'"):
            frozen.check()
        assert not frozen.is_released
        assert "no sign of life" in caplog.text
        claim.confirm()


def test_a_renewal_that_comes_too_late_does_not_win_the_claim_back(tmp_path):
    """The owner is frozen between its look and its writing."""
    frozen = _claim(tmp_path, "a")
    frozen.start()
    _freeze(frozen)
    with _claim(tmp_path, "b") as claim:
        claim.start()
        frozen._files.write(1, frozen._owner)
        with pytest.raises(group_claim.ClaimLostError):
            frozen.confirm()
        claim.confirm()
        _until(lambda: claim._owner.counter > 1)
        claim.confirm()


def test_of_many_claimants_one_wins(tmp_path):
    """All find the same claim, whose owner has given no sign for too long."""
    dead = _claim(tmp_path, "dead")
    dead.start()
    _freeze(dead)
    claims = [_claim(tmp_path, f"c{i}", lease_secs=3) for i in range(8)]
    outcomes = []

    def start(claim):
        try:
            claim.start()
            outcomes.append(claim)
        except group_claim.GroupClaimedError:
            outcomes.append(None)

    threads = [threading.Thread(target=start, args=[c]) for c in claims]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_WAIT_SECS)
    winners = [claim for claim in outcomes if claim]
    assert len(outcomes) == 8 and len(winners) == 1
    winners[0].confirm()
    winners[0].release()


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EROFS])
def test_an_outage_costs_no_claim(tmp_path, number, caplog):
    storage = storage_cases.Refusing()
    with _claim(tmp_path, "a", file_system=storage) as claim:
        claim.start()
        storage.number = number
        _until(lambda: "Cannot claim" in caplog.text)
        with pytest.raises(OSError) as caught:
            claim.confirm()
        assert caught.value.errno == number
        time.sleep(0.2)
        # Told once, and no reason to stop.
        assert caplog.text.count("Cannot claim") == 1
        claim.check()
        storage.number = None
        counter = claim._owner.counter
        _until(lambda: claim._owner.counter > counter)
        claim.confirm()


def test_a_claim_can_be_taken_once_the_storage_is_back(tmp_path):
    storage = storage_cases.Refusing()
    storage.number = errno.EIO
    with _claim(tmp_path, "a", file_system=storage) as claim:
        claim.start()
        with pytest.raises(RuntimeError, match="could not be claimed yet"):
            claim.confirm()
        storage.number = None
        _until(lambda: claim._number)
        claim.confirm()


def test_a_late_look_finds_the_living_owner(tmp_path):
    storage = storage_cases.Refusing()
    storage.number = errno.EIO
    with _claim(tmp_path, "a") as first:
        first.start()
        second = _claim(tmp_path, "b", file_system=storage, lease_secs=1e6)
        second.start()
        storage.number = None
        _until(lambda: not second.is_active)
        with pytest.raises(group_claim.GroupClaimedError):
            second.check()
        second.release()
        first.confirm()


def test_a_claim_that_was_deleted_is_written_again(tmp_path):
    with _claim(tmp_path / "group_0", "a") as claim:
        claim.start()
        os.rename(tmp_path / "group_0", tmp_path / "away")
        claim.confirm()
        file = tmp_path / "group_0/.claim-1/owner.json"
        _until(file.exists)
        with pytest.raises(group_claim.GroupClaimedError):
            _claim(tmp_path / "group_0", "b", lease_secs=1e6).start()


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b'{"pid": 1}', b"\xff"])
def test_what_is_no_claim_holds_the_lease_at_most(tmp_path, text):
    (tmp_path / ".claim-7").mkdir()
    (tmp_path / ".claim-7/owner.json").write_bytes(text)
    with _claim(tmp_path, "a") as claim:
        claim.start()
        assert sorted(os.listdir(tmp_path)) == [".claim-7", ".claim-8"]


def test_old_claims_do_not_pile_up(tmp_path):
    for i in range(5):
        with _claim(tmp_path, f"c{i}") as claim:
            claim.start()
    assert sorted(os.listdir(tmp_path)) == [".claim-4", ".claim-5"]


@pytest.mark.parametrize(
    "options", [{"renew_secs": 0}, {"lease_secs": 1, "renew_secs": 0.5}]
)
def test_bad_options_are_named(tmp_path, options):
    with pytest.raises(ValueError, match="`lease_secs`"):
        _claim(tmp_path, "a", **options)


# ---- claims that others have forged ----


_SIGNER = signing.Signer(b"0123456789abcdef")
_ENDLESS = 999_999_999_999_999_999


def _forge(directory, name, **changes):
    record = _record("forged", machine="", **changes)
    path = directory / name / "owner.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(record.to_json())


@pytest.mark.parametrize("signer", [None, _SIGNER])
def test_a_claim_of_an_endless_number_hangs_no_start(tmp_path, signer, caplog):
    (tmp_path / f".claim-{_ENDLESS}").mkdir()
    for name in "ab":
        with _claim(tmp_path, name, signer=signer, lease_secs=1e6) as claim:
            claim.start()
            claim.confirm()
    assert str(_ENDLESS) in caplog.text


def test_the_highest_number_that_counts_is_refused_in_words(tmp_path):
    (tmp_path / ".claim-10000000").mkdir()
    with pytest.raises(group_claim.GroupClaimedError, match="Remove it"):
        _claim(tmp_path, "a").start()


def test_claims_without_the_runs_signature_do_nothing(tmp_path, caplog):
    for number in (1, 2, 7):
        _forge(tmp_path, f".claim-{number}")
    with _claim(tmp_path, "a", signer=_SIGNER, lease_secs=1e6) as claim:
        claim.start()
        name = claim._files._name(1)
        _forge(tmp_path, ".claim-2", counter=2)
        # The name of a claim to come can neither be guessed nor be copied.
        _forge(tmp_path, name.replace("-1-", "-2-"))
        claim.confirm()
        _forge(tmp_path, name)
        claim.confirm()
        file = tmp_path / name / "owner.json"
        _until(lambda: "forged" not in file.read_text())
        claim.confirm()
    assert caplog.text.count("Ignoring claims") == 1
    assert ".claim-" in caplog.text and "KEY_FILE" in caplog.text
    with _claim(tmp_path, "b", signer=_SIGNER, lease_secs=1e6) as after:
        after.start()
        after.confirm()


def test_a_forged_owner_holds_a_signed_claim_no_longer_than_the_lease(
    tmp_path,
):
    dead = _claim(tmp_path, "a", signer=_SIGNER)
    dead.start()
    _freeze(dead)
    name = dead._files._name(1)
    stop = threading.Event()

    def forge():
        counter = 0
        while not stop.wait(0.02):
            counter += 1
            _forge(tmp_path, name, counter=counter)

    forger = threading.Thread(target=forge, daemon=True)
    forger.start()
    try:
        with _claim(tmp_path, "b", signer=_SIGNER) as claim:
            claim.start()
            claim.confirm()
    finally:
        stop.set()
        forger.join(_WAIT_SECS)


def test_signed_claims_still_keep_others_out(tmp_path):
    with _claim(tmp_path, "a", signer=_SIGNER) as first:
        first.start()
        second = _claim(tmp_path, "b", signer=_SIGNER, lease_secs=1e6)
        with pytest.raises(
            group_claim.GroupClaimedError, match="incarnation a"
        ):
            second.start()
        first.confirm()
    frozen = _claim(tmp_path, "c", signer=_SIGNER)
    frozen.start()
    _freeze(frozen)
    with _claim(tmp_path, "d", signer=_SIGNER) as claim:
        claim.start()
        with pytest.raises(group_claim.ClaimLostError, match="incarnation d"):
            frozen.confirm()


def test_what_was_there_before_is_no_sign_of_life():
    change = group_claim.LastChange()
    for now, text in enumerate([b"1", b"2", b"1", b"2", b"1"]):
        change.see(group_claim.Claim(1, text, None), float(now))
    assert (change.num_moves, change.since) == (1, 1.0)


# ---- the exchange ----


def _publish(hub, step):
    return hub.publish(
        lambda directory: pathlib.Path(directory, "x").write_text("y"),
        group=0,
        step=step,
    )


class _Telling:
    """Storage that tells when something is about to be written."""

    on_write = staticmethod(lambda path: None)

    def write(self, path, blocks):
        self.on_write(path)
        super().write(path, blocks)


@pytest.mark.parametrize("when", ["writing", "committing"])
@pytest.mark.parametrize(
    "kind", [filesystem.LocalFileSystem, storage_cases.NoDirectoryRename]
)
def test_a_lost_claim_ends_publishing_right_before_the_commit(
    tmp_path, kind, when
):
    options = {"lease_secs": 0.6, "renew_secs": 0.05}
    storage = type("Storage", (_Telling, kind), {})()
    old = publisher.Exchange(str(tmp_path), file_system=storage)
    new = publisher.Exchange(tmp_path)
    claim = old.claim(0, **options)
    assert old.claim(0) is claim
    _publish(old, 1)

    def all_of_anothers_life(path=".tmp-2-"):
        if "/2/" in path or ".tmp-2-" in path:
            storage.on_write = lambda path: None
            _freeze(claim)
            with new.claim(0, **options):
                _publish(new, 5)

    def write(directory):
        if when == "writing":
            all_of_anothers_life()
        else:
            storage.on_write = all_of_anothers_life
        pathlib.Path(directory, "x").write_text("late")

    with pytest.raises(group_claim.ClaimLostError):
        old.publish(write, group=0, step=2)
    with pytest.raises(group_claim.ClaimLostError):
        _publish(old, 6)
    assert new.steps(0) == [1, 5]
    new.verify(new.open(0, 5))
    claim.release()
    with pytest.raises(group_claim.ClaimLostError):
        _publish(old, 7)


def test_publishing_needs_no_claim_and_minds_none_that_was_released(tmp_path):
    hub = publisher.Exchange(tmp_path)
    _publish(hub, 1)
    with hub.claim(0):
        _publish(hub, 2)
    _publish(hub, 3)
    with publisher.Exchange(tmp_path).claim(0):
        _publish(hub, 4)
    assert hub.steps(0) == [1, 2, 3, 4]
    assert hub.latest(0).step == 4


def test_there_is_nothing_to_claim_without_a_place():
    with pytest.raises(versions.ExportError, match="root=None"):
        publisher.Exchange(None).claim(0)


def test_a_training_that_was_interrupted_does_not_stand_in_its_own_way(
    tmp_path,
):
    """Cells of a notebook are run again in the same process."""
    first = publisher.Exchange(tmp_path).claim(0)
    with publisher.Exchange(tmp_path).claim(0) as second:
        second.confirm()
        with pytest.raises(group_claim.ClaimLostError):
            first.confirm()


def test_urls_are_claimed_too(tmp_path):
    pytest.importorskip("tensorflow")
    root = f"ram://{tmp_path.name}/claims"
    options = {"lease_secs": 0.6, "renew_secs": 0.05}
    hub = publisher.Exchange(root)
    with hub.claim(0, **options) as claim:
        _publish(hub, 1)
        claim.confirm()
        assert hub.latest(0).step == 1
    with publisher.Exchange(root).claim(0, **options) as after:
        after.confirm()


# ---- in processes of their own ----


class _Process:
    def __init__(self, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, _PROGRAM, *map(str, arguments)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
        )
        self.pid = self.process.pid
        self.events = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.events.append(json.loads(line))

    def names(self):
        return [event["event"] for event in self.events]

    def has(self, name):
        return name in self.names()

    def incarnation(self):
        return self.events[0]["incarnation"]

    def exit_code(self):
        code = self.process.wait(_WAIT_SECS)
        self._reader.join(_WAIT_SECS)
        return code

    def kill(self):
        self.process.kill()
        self.process.wait(_WAIT_SECS)
        self._reader.join(_WAIT_SECS)
        self.process.stdout.close()


@pytest.fixture
def start(no_process_left):
    processes = []

    def begin(*arguments):
        processes.append(_Process(*arguments))
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()


@pytest.fixture(params=["local", "s3"])
def root(request, tmp_path):
    if request.param == "local":
        yield tmp_path
        return
    with object_store.serve() as server:
        yield f"{server.url}/hub"


def _check_versions(root, *processes):
    """Whole, and each incarnation's steps above those of the one before."""
    hub = publisher.Exchange(root)
    found = []
    for step in hub.steps(0):
        version = hub.open(0, step)
        hub.verify(version)
        found.append(version.manifest.incarnation)
    assert list(dict.fromkeys(found)) == [p.incarnation() for p in processes]
    changes = sum(a != b for a, b in zip(found, found[1:], strict=False))
    assert changes == len(processes) - 1


@pytest.mark.multiprocess
def test_two_processes_cannot_publish_for_one_group(root, start):
    first = start(root, 1000)
    _until(lambda: first.has("published"))
    second = start(root, 1000)
    assert second.exit_code() == 2
    told = second.events[-1]["message"]
    for name in (str(first.pid), socket.gethostname(), first.incarnation()):
        assert name in told
    assert first.process.poll() is None
    # Dead but not yet waited for: a zombie must not hold the group.
    os.kill(first.pid, signal.SIGKILL)
    third = start(root, 1000)
    _until(lambda: third.has("published"))
    third.kill()
    _check_versions(root, first, third)


@pytest.mark.multiprocess
def test_a_dead_owner_on_another_machine_holds_the_lease(tmp_path, start):
    first = start(tmp_path, 1.5, "another machine's boot".replace(" ", "-"))
    _until(lambda: first.has("published"))
    first.kill()
    second = start(tmp_path, 1.5)
    _until(lambda: second.has("published"))
    logged = [e["message"] for e in second.events if e["event"] == "log"]
    assert any("no sign of life for 2 s" in message for message in logged)
    second.kill()
    _check_versions(tmp_path, first, second)


@pytest.mark.multiprocess
def test_a_process_that_was_stopped_does_not_publish_any_more(tmp_path, start):
    first = start(tmp_path, 1.5)
    _until(lambda: first.has("published"))
    os.kill(first.pid, signal.SIGSTOP)
    second = start(tmp_path, 1.5)
    _until(lambda: second.has("published"))
    os.kill(first.pid, signal.SIGCONT)
    assert first.exit_code() == 3
    for name in (str(second.pid), second.incarnation()):
        assert name in first.events[-1]["message"]
    count = second.names().count("published")
    _until(lambda: second.names().count("published") > count + 2)
    second.kill()
    _check_versions(tmp_path, first, second)
