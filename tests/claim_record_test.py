import dataclasses
import json
import os
import signal
import subprocess
import sys

import hypothesis
import pytest
from hypothesis import strategies as st

from tfdistill import claim_record
from tfdistill import process_status

_WAIT_SECS = 60.0


def _own():
    return claim_record.ClaimRecord.of_this_process("a1")


def test_a_record_survives_as_text():
    record = dataclasses.replace(_own(), counter=7, released=True)
    text = record.to_json().encode()
    assert len(text) < claim_record.MAX_BYTES
    assert claim_record.ClaimRecord.from_json(text) == record
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
    assert claim_record.ClaimRecord.from_json(json.dumps(fields)) is None


def test_a_torn_record_is_none():
    text = _own().to_json().encode()
    for length in range(len(text) - 2):
        assert claim_record.ClaimRecord.from_json(text[:length]) is None
    assert claim_record.ClaimRecord.from_json(b"[" * 100_000) is None


@hypothesis.given(st.binary(max_size=300))
def test_any_bytes_are_a_record_or_none(text):
    found = claim_record.ClaimRecord.from_json(text)
    assert found is None or isinstance(found, claim_record.ClaimRecord)


def test_a_name_of_a_host_is_made_fit(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "a b\nc" * 100)
    record = _own()
    assert claim_record.ClaimRecord.from_json(record.to_json()) == record


def test_a_living_process_is_not_gone_and_a_dead_one_is():
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE
    ) as child:
        record = dataclasses.replace(
            _own(), pid=child.pid, started=process_status.started(child.pid)
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
    monkeypatch.setattr(process_status, "machine", lambda: "")
    assert not dataclasses.replace(dead, machine="").is_gone()


def test_processes_that_are_hidden_count_as_living(monkeypatch):
    """As under /proc with hidepid, for processes of other users."""
    record = dataclasses.replace(_own(), pid=os.getppid(), started=1)
    assert record.is_gone()
    monkeypatch.setattr(process_status, "of", lambda pid: None)
    assert not record.is_gone()


def test_this_process_does_not_stand_in_its_own_way():
    assert _own().is_gone()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
