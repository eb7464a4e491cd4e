"""Signatures of manifests, and the keys that make them."""

import dataclasses
import json
import os
import stat

import pytest

from tests.exchange import manifest_test
from tfdistill.exchange import manifest
from tfdistill.exchange import publisher
from tfdistill.exchange import signing
from tfdistill.exchange import versions
from tfdistill.follow import follower

KEY = b"0123456789abcdef0123456789abcdef"
OTHER = b"fedcba9876543210fedcba9876543210"
SHA = manifest_test.SHA


def make(**changes):
    extras = {"labels": ["a", "\ud800"], "loss": -0.0}
    return manifest_test.make(extras=extras, **changes)


def write(directory):
    with open(f"{directory}/saved_model.pb", "wb") as file:
        file.write(b"graph")


def exchange(root, key=KEY):
    return publisher.Exchange(root, key=key)


def test_a_signature_survives_the_file():
    signer = signing.Signer(KEY)
    signed = signer.sign(make())
    again = manifest.Manifest.from_json(signed.to_json())
    assert not signer.fault(again)
    assert again.extras["labels"] == ["a", "\ud800"]
    assert not signing.is_signed(make())
    # Other white space and order of fields are the same content.
    text = json.dumps(json.loads(signed.to_json()), indent=7)
    assert not signer.fault(manifest.Manifest.from_json(text))


@pytest.mark.parametrize(
    "changes",
    [
        {"group": 2},
        {"step": 21},
        {"files": {"saved_model.pb": manifest.FileEntry(3, SHA[::-1])}},
        {"variables": {"v": {"shape": [1], "dtype": "float32"}}},
    ],
)
def test_every_change_is_noticed(changes):
    signer = signing.Signer(KEY)
    changed = dataclasses.replace(signer.sign(make()), **changes)
    assert "changed, or signed with" in signer.fault(changed)


def test_the_key_shows_nowhere():
    signer = signing.Signer(KEY)
    assert KEY.decode() not in repr(signer) + str(signer)
    fault = signer.fault(signing.Signer(OTHER).sign(make()))
    assert fault and KEY.decode() not in fault
    # Nor what would have been right.
    right = signer.sign(make()).extras["signature"]
    assert right not in fault


@pytest.mark.parametrize("key", [b"x" * 15, "x" * 32])
def test_what_is_no_key(key):
    with pytest.raises(ValueError, match="key of an exchange must") as caught:
        signing.Signer(key)
    assert "x" * 15 not in str(caught.value)


def test_the_environment_has_a_key_or_a_file_of_it(tmp_path):
    path = tmp_path / "key"
    signing.make_file(path)
    key = path.read_bytes().strip()
    signed = signing.Signer(key).sign(make())
    for environ in (
        {signing.FILE_VARIABLE: str(path)},
        {signing.KEY_VARIABLE: f" {key.decode()}\n"},
        {signing.KEY_VARIABLE: key.decode(), signing.FILE_VARIABLE: ""},
    ):
        assert not signing.signer_for("environment", environ).fault(signed)
        assert signing.has_key(environ)
    assert signing.signer_for("environment", {}) is None
    assert signing.signer_for(None, {signing.KEY_VARIABLE: "x"}) is None
    with pytest.raises(ValueError, match="At most one of"):
        environ = {signing.KEY_VARIABLE: "x", signing.FILE_VARIABLE: "y"}
        signing.signer_for("environment", environ)
    with pytest.raises(ValueError, match="KEY_FILE must name a file.*received"):
        environ = {signing.FILE_VARIABLE: str(tmp_path / "absent")}
        signing.signer_for("environment", environ)


def test_a_key_file_is_its_owners_alone_and_stays(tmp_path):
    path = tmp_path / "key"
    umask = os.umask(0)
    try:
        signing.make_file(path)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    content = path.read_bytes()
    signing.make_file(path)
    assert path.read_bytes() == content
    path.write_text("short")
    with pytest.raises(ValueError, match="must have 16"):
        signing.make_file(path)


def test_the_environments_key_is_the_default(tmp_path, monkeypatch):
    monkeypatch.setenv(signing.KEY_VARIABLE, KEY.decode())
    publisher.Exchange(tmp_path).publish(write, group=1, step=7)
    exchange(tmp_path).open(1, 7)
    with pytest.raises(versions.CorruptVersionError):
        exchange(tmp_path, OTHER).open(1, 7)
    # A group without an exchange needs no key.
    monkeypatch.setenv(signing.KEY_VARIABLE, "short")
    publisher.Exchange(None)


@pytest.mark.parametrize(
    ("key", "reason"), [(None, "no signature"), (OTHER, "another key")]
)
def test_other_publishers_are_refused(tmp_path, caplog, key, reason):
    exchange(tmp_path, key).publish(write, group=1, step=7)
    reader = exchange(tmp_path)
    with pytest.raises(versions.CorruptVersionError, match=reason):
        reader.open(1, 7)
    assert reader.latest(1) is reader.latest(1) is None
    assert reason in caplog.text
    # And do not keep a group from its own step.
    reader.publish(write, group=1, step=7)
    reader.verify(reader.latest(1))


@pytest.mark.parametrize("target", ["group_1/8", "group_2/7", "group_1/6"])
def test_a_replayed_manifest_is_refused(tmp_path, target):
    writer = exchange(tmp_path)
    writer.publish(write, group=1, step=7)
    to = tmp_path / target
    to.parent.mkdir(exist_ok=True)
    (tmp_path / "group_1" / "7").rename(to)
    group, step = (int(part) for part in target[6:].split("/"))
    with pytest.raises(versions.CorruptVersionError, match="copied there"):
        writer.open(group, step)
    # Its numbers cannot be put right without the key.
    path = to / "manifest.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "group": group, "step": step}))
    with pytest.raises(versions.CorruptVersionError, match="cannot be trusted"):
        writer.open(group, step)


def _crowd(root, steps, text):
    for step in steps:
        path = root / "group_1" / str(step)
        path.mkdir(parents=True)
        (path / "manifest.json").write_text(text)


@pytest.mark.parametrize("text", ["{}", "unsigned"])
def test_unsigned_versions_hide_no_signed_one(tmp_path, text):
    if text == "unsigned":
        text = make(step=2000).to_json()
    for step in (5, 6):
        exchange(tmp_path).publish(write, group=1, step=step)
    _crowd(tmp_path, [*range(2000, 2100), 10**12 + 1, 10**17], text)
    hub = exchange(tmp_path)
    assert hub.latest(1).step == 6
    following = follower.Follower(
        hub, 1, read=lambda version: version.step, alone=True
    )
    following.look()
    following.stage()
    following.reject(following.announced, "its predictions are bad")
    following.look()
    following.stage()
    assert following.take_staged().values == 5
