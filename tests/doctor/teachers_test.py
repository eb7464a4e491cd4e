"""Tests of the doctor's check of teachers, with versions that are at fault."""

import fsspec

import tfdistill
from tests.cases import codistillation as cases
from tfdistill.doctor import checks
from tfdistill.doctor import teachers
from tfdistill.exchange import publisher


def _examine(exchange, *, key="environment"):
    reader = publisher.Exchange(exchange.root, key=key)
    return list(teachers.examine(reader, group=0, peers=[1]))


def _only(found, status):
    (result,) = found
    assert result.status == status, result
    return result


def _publish(exchange, student=None, **changes):
    return cases.publish(exchange, student or cases.deep(1), **changes)


def _own(exchange):
    cases.publish(exchange, cases.deep(0), group=0, step=20)


def test_a_good_teacher(exchange):
    _publish(exchange)
    found = _only(_examine(exchange), checks.OK)
    assert "no version to compare it with" in found.seen
    _own(exchange)
    assert _only(_examine(exchange), checks.OK).seen == (
        "group 1, version 10: complete, with the same graph as this group's"
    )


def test_a_damaged_file(exchange, tmp_path):
    _own(exchange)
    version = _publish(exchange)
    (path,) = (tmp_path / "exchange/group_1/10/variables").glob("*.data*")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    found = _only(_examine(exchange), checks.FAILED)
    assert "SHA-256" in found.seen
    (tmp_path / "exchange/group_1/10/manifest.json").write_text("{")
    assert "manifest" in _only(_examine(exchange), checks.FAILED).seen
    assert version.step == 10


def test_a_peer_of_another_architecture(exchange):
    _own(exchange)
    _publish(exchange, cases.linear(1))
    found = _only(_examine(exchange), checks.WARNING)
    assert "its graph differs from this group's" in found.seen
    assert "allow_other_graphs" in found.remedy


def test_an_exchange_behind_a_url():
    assert checks.of_root("memory://doctor/hub").status == checks.OK
    assert fsspec.filesystem("memory").find("/doctor") == []
    found = checks.of_root("nosuch://doctor/hub")
    assert found.status == checks.FAILED
    assert "nosuch:// must be" in found.seen


def test_a_version_that_another_key_has_signed(tmp_path):
    keys = b"a" * 16, b"b" * 16
    theirs = tfdistill.Exchange(tmp_path / "exchange", key=keys[0])
    _publish(theirs)
    assert _only(_examine(theirs, key=keys[0]), checks.OK)
    found = _only(_examine(theirs, key=keys[1]), checks.FAILED)
    assert "signature" in found.seen
    assert "TFDISTILL_EXCHANGE_KEY_FILE" in found.remedy
