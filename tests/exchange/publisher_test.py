"""Versions published and pruned, and what a failure at any call leaves."""

import errno
import hashlib
import os
import pathlib
import random
import resource
import sys
import time

import pytest

from tests.cases import object_store
from tests.cases import storage as storage_cases
from tests.cases import tiers
from tfdistill.exchange import filesystem
from tfdistill.exchange import manifest
from tfdistill.exchange import publisher
from tfdistill.exchange import versions

FILES = {
    "saved_model.pb": b"graph",
    "fingerprint.pb": b"print",
    "variables/variables.index": b"index",
    "variables/variables.data-00000-of-00001": bytes(range(256)) * 4,
}


def writer(files=FILES, seed=0):
    def write(directory):
        for name, content in files.items():
            path = pathlib.Path(directory, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content + b"%d" % seed)

    return write


def publish(hub, step, *, group=0, **kwargs):
    return hub.publish(writer(seed=step), group=group, step=step, **kwargs)


def tree(root):
    return sorted(
        str(path.relative_to(root)) for path in pathlib.Path(root).rglob("*")
    )


def hidden_names(root):
    return [name for name in tree(root) if "/." in name or name[0] == "."]


@pytest.fixture
def hub(tmp_path):
    return publisher.Exchange(tmp_path / "exchange")


def test_published_version_is_what_was_written(hub):
    version = publish(
        hub,
        7,
        group=2,
        graph_fingerprint="abc",
        inputs={"shape": (None, 4)},
        outputs=["x"],
        variables={"kernel": {"shape": (4, 2), "dtype": "float32"}},
        extras={"labels": ["a"]},
    )
    assert version.path == f"{hub.root}/group_2/7"
    for name, content in FILES.items():
        written = content + b"7"
        assert pathlib.Path(version.path, name).read_bytes() == written
        assert version.manifest.files[name] == manifest.FileEntry(
            len(written), hashlib.sha256(written).hexdigest()
        )
    assert version.manifest.inputs == {"shape": [None, 4]}
    assert version.manifest.variables["kernel"]["shape"] == [4, 2]
    assert version.manifest.libraries["python"] == sys.version.split()[0]
    assert version.manifest.libraries["tfdistill"]
    assert version.manifest.incarnation == hub.incarnation
    assert abs(version.manifest.created - time.time()) < 600
    other = publisher.Exchange(hub.root)
    assert other.open(2, 7) == version
    assert other.latest(2) == version
    other.verify(version)
    assert [n for n in tree(hub.root) if "." in n] == sorted(
        f"group_2/7/{name}" for name in [*FILES, "manifest.json"]
    )


def test_all_is_durable_before_it_is_visible(tmp_path):
    faults = storage_cases.Faults(filesystem.LocalFileSystem())
    hub = publisher.Exchange(str(tmp_path), file_system=faults)
    publish(hub, 1)
    group = f"{tmp_path}/group_0"
    stage = f"{group}/.tmp-1-{hub.incarnation}"
    moved = faults.calls.index(("move", stage))
    synced = {path for name, path in faults.calls[:moved] if name == "sync"}
    assert synced == {stage, f"{stage}/variables"} | {
        f"{stage}/{name}" for name in FILES
    }
    written = [path for name, path in faults.calls[:moved] if name == "write"]
    assert written == [f"{stage}/manifest.json"]
    assert faults.calls[moved - 1] == ("sync", stage)
    assert faults.calls[moved + 1] == ("sync", group)


def test_steps_are_ordered_as_numbers_and_foreign_names_ignored(hub):
    for step in (9, 100, 20):
        publish(hub, step)
    group = pathlib.Path(hub.group_path(0))
    for name in ("007", "latest", "-1", "1.5", "20 ", "٣", "9" * 19, "9" * 30):
        (group / name).mkdir()
        (group / name / "manifest.json").write_text("{}")
    (group / "60").mkdir()
    (group / "60" / "manifest.json").symlink_to(group / "100/manifest.json")
    assert hub.steps(0) == [9, 20, 100]
    assert hub.latest(0).step == 100


def test_version_that_is_whole_is_not_published_again(hub):
    version = publish(hub, 5)
    with pytest.raises(versions.VersionExistsError, match=hub.incarnation):
        hub.publish(pytest.fail, group=0, step=5)
    hub.verify(version)
    assert hidden_names(hub.root) == []


def test_version_that_is_broken_is_replaced(hub, caplog):
    path = pathlib.Path(publish(hub, 5).path)
    (path / "saved_model.pb").write_bytes(b"broken")
    (path / "more.txt").write_text("extra")
    hub.verify(publish(hub, 5))
    assert "saved_model.pb" in caplog.text or "more.txt" in caplog.text
    assert not (path / "more.txt").exists()
    os.remove(path / "manifest.json")
    hub.verify(publish(hub, 5))
    assert hidden_names(hub.root) == []


def test_failing_writer_leaves_nothing_and_keeps_its_cause(hub):
    old = publish(hub, 1)

    def write(directory):
        writer()(directory)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(versions.ExportError, match="No space left") as caught:
        hub.publish(write, group=0, step=2)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert hub.steps(0) == [1]
    assert hidden_names(hub.root) == []
    hub.verify(old)
    hub.verify(publish(hub, 2))


def test_a_full_disk_costs_exports_until_there_is_room(tmp_path, clock):
    hub = publisher.Exchange(
        tmp_path, max_to_keep=2, min_keep_secs=60, clock=clock
    )
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with hub.claim(0) as claim:
        for step in (1, 2, 3):
            publish(hub, step)
        assert hub.steps(0) == [1, 2, 3]
        clock.now += 61
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
            for step in (4, 5, 6):
                with pytest.raises(versions.ExportError, match="too large"):
                    publish(hub, step)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        # What may go makes room although no export succeeds.
        assert hub.steps(0) == [2, 3]
        assert hidden_names(tmp_path) == []
        claim.check()
        hub.verify(publish(hub, 7))
    assert hub.steps(0) == [3, 7]
    assert hidden_names(tmp_path) == []


FILE_SYSTEMS = {
    "local": filesystem.LocalFileSystem,
    "no_rename": storage_cases.NoDirectoryRename,
    "memory": storage_cases.MemoryFileSystem,
}
OPTIONS = dict(max_to_keep=2, min_keep_secs=0)


def begun(root, inner, *, damaged=False):
    """A group with two versions, and perhaps a third one that is damaged."""
    hub = publisher.Exchange(root, file_system=inner, **OPTIONS)
    with hub.claim(0):
        for step in (1, 2):
            publish(hub, step)
        if damaged:
            path = publish(hub, 3).path
            inner.write(f"{path}/saved_model.pb", [b"damaged"])
    return hub


def publish_third(root, faults):
    hub = publisher.Exchange(root, file_system=faults, **OPTIONS)
    with hub.claim(0):
        publish(hub, 3)


def is_whole(hub, step):
    try:
        hub.verify(hub.open(0, step))
    except versions.CorruptVersionError:
        return False
    return True


@pytest.mark.parametrize(
    ("kind", "dead", "damaged"),
    [
        ("local", False, False),
        tiers.deep("memory", False, False),
        tiers.deep("local", True, False),
        ("memory", True, False),
        ("local", True, True),
        ("no_rename", True, True),
    ],
)
def test_failure_at_every_call_shows_no_part(kind, dead, damaged, tmp_path):
    """Claiming, writing, committing, pruning and sweeping alike."""
    inner = FILE_SYSTEMS[kind]()
    begun(str(tmp_path / "count"), inner, damaged=damaged)
    counted = storage_cases.Faults(inner)
    publish_third(str(tmp_path / "count"), counted)
    assert len(counted.calls) > 20
    outcomes = set()
    for fail_at in range(1, len(counted.calls) + 1):
        root, inner = str(tmp_path / str(fail_at)), FILE_SYSTEMS[kind]()
        reader = begun(root, inner, damaged=damaged)
        error = OSError(errno.EIO, "injected")
        faults = storage_cases.Faults(
            inner,
            fail_at=fail_at,
            error=storage_cases.Killed() if dead else error,
            dead=dead,
        )
        try:
            publish_third(root, faults)
            outcomes.add("published")
        except (versions.ExportError, storage_cases.Killed):
            outcomes.add("failed")
        assert len(faults.calls) >= fail_at
        assert reader.latest(0).step in (2, 3)
        broken = [s for s in reader.steps(0) if not is_whole(reader, s)]
        assert broken == [] or damaged and broken == [3]
        assert 2 in reader.steps(0)
        successor = publisher.Exchange(root, file_system=inner, **OPTIONS)
        following = [3, 5] if broken else [4, 5]
        with successor.claim(0):
            for step in following:
                successor.verify(publish(successor, step))
        assert reader.steps(0) == following
        left = sorted(inner.list_dir(f"{root}/group_0"))
        assert left == list(map(str, following))
    assert "failed" in outcomes
    assert not dead or "published" not in outcomes


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def link_to_the_same(path):
    copy = path.parent.parent.parent / "copy"
    path.rename(copy)
    path.symlink_to(copy)


DAMAGES = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: path.write_bytes(b""),
    "flipped": flip,
    "deleted": os.remove,
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "link": link_to_the_same,
    "pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "huge": lambda path: os.truncate(path, 2**40),
    "directory": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("name", sorted(FILES))
def test_damage_is_found_and_the_file_named(hub, name):
    for step, damage in enumerate(DAMAGES.values(), start=1):
        version = publish(hub, step)
        hub.verify(version)
        damage(pathlib.Path(version.path, name))
        with pytest.raises(versions.CorruptVersionError, match=name):
            hub.verify(version)


@pytest.mark.parametrize("name", ["saved_model.pbtxt", "variables/.hidden"])
def test_file_outside_the_manifest_is_found(hub, name):
    version = publish(hub, 1)
    path = pathlib.Path(version.path, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")
    with pytest.raises(versions.CorruptVersionError, match=name):
        hub.verify(version)


def test_linked_version_or_group_is_not_followed(hub, tmp_path):
    version = publish(hub, 1)
    away = tmp_path / "away"
    os.rename(version.path, away)
    os.symlink(away, version.path)
    assert hub.steps(0) == []
    assert hub.latest(0) is None
    with pytest.raises(versions.VersionNotFoundError, match="links"):
        hub.open(0, 1)
    os.symlink(hub.group_path(0), hub.group_path(3))
    assert hub.latest(3) is None
    with pytest.raises(versions.VersionNotFoundError, match="links"):
        hub.open(3, 1)


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_superseded_versions_stay_for_min_keep_secs(kind, tmp_path, clock):
    rng = random.Random(3)
    hub = publisher.Exchange(
        str(tmp_path),
        file_system=FILE_SYSTEMS[kind](),
        max_to_keep=2,
        min_keep_secs=60,
        clock=clock,
    )
    superseded = {}
    pruned = 0
    for step in range(1, 80):
        before = hub.steps(0)
        publish(hub, step)
        superseded.setdefault(step - 1, clock.now)
        for gone in set(before) - set(hub.steps(0)):
            assert clock.now - superseded[gone] >= 60
            pruned += 1
        assert hub.steps(0)[-2:] == [s for s in (step - 1, step) if s > 0]
        clock.now += rng.choice([0, 1, 10, 59, 61])
    assert pruned > 50


def test_restart_from_an_older_step_keeps_what_it_publishes(tmp_path, clock):
    hub = publisher.Exchange(
        tmp_path, max_to_keep=2, min_keep_secs=60, clock=clock
    )
    for step in (100, 200, 300):
        publish(hub, step)
        clock.now += 100
    publish(hub, 150)
    assert 150 in hub.steps(0)
    assert hub.latest(0).step == 300


def test_pruning_that_fails_does_not_fail_the_export(tmp_path, caplog):
    class Stuck(filesystem.LocalFileSystem):
        def remove_tree(self, path):
            if ".trash" in path:
                raise OSError(errno.EBUSY, "Device or resource busy", path)
            super().remove_tree(path)

    root = str(tmp_path)
    hub = publisher.Exchange(root, file_system=Stuck(), **OPTIONS)
    for step in (1, 2, 3):
        hub.verify(publish(hub, step))
    assert "busy" in caplog.text
    assert hub.steps(0) == [2, 3]
    publish(publisher.Exchange(root), 4)
    assert hidden_names(root) == []


def test_an_object_store_is_published_to_pruned_and_swept(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with object_store.serve() as s3:
        # What killed publishers left: of an upload, and of a removal.
        s3.put("hub/group_0/1/saved_model.pb", b"half")
        s3.put("hub/group_0/2/variables/values", b"half")
        hub = publisher.Exchange(
            f"{s3.url}/hub", max_to_keep=2, min_keep_secs=0, key=b"k" * 16
        )
        assert hub.latest(0) is None
        with hub.claim(0):
            for step in (2, 3, 4):
                publish(hub, step)
            assert hub.latest(0).step == 4
            with pytest.raises(versions.VersionExistsError):
                publish(hub, 4)
        for step in (3, 4):
            hub.verify(hub.open(0, step))
        storage, root = filesystem.for_root(f"{s3.url}/hub/group_0")
        names = set(storage.list_dir(root))
        assert names == {"3", "4"}
        storage.write(f"{root}/4/saved_model.pb", [b"other"])
        with pytest.raises(versions.CorruptVersionError):
            hub.verify(hub.open(0, 4))
        publish(hub, 4)
        hub.verify(hub.latest(0))
    assert tree(tmp_path) == []
