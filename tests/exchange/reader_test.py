"""Tests of the newest versions, as found without reading what they hold."""

import dataclasses
import errno
import functools
import os
import pathlib
import random
import shutil
import time

import pytest

from tests.cases import storage as storage_cases
from tfdistill.exchange import filesystem
from tfdistill.exchange import manifest
from tfdistill.exchange import publisher
from tfdistill.exchange import versions
from tfdistill.follow import follower as follow

_SMALL = {"saved_model.pb": b"graph", "variables/index": b"index"}
_NUM_LIVES = 1_500


def _writer(text):
    def write(directory):
        for name, content in _SMALL.items():
            path = pathlib.Path(directory, name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content + text)

    return write


def _publish(hub, step, text=None):
    return hub.publish(
        _writer(b"%d" % step if text is None else text), group=0, step=step
    )


# ---- changes that come into sight late, and in any order ----


@dataclasses.dataclass(frozen=True)
class _Life:
    """What happened to a store, and what each whole version may hold."""

    changes: list
    contents: dict
    last_step: int


def _life(store, hubs):
    contents = {}
    for step, hub in enumerate(hubs, start=1):
        _publish(hub, step)
        contents[step] = {b"%d" % step}
    return _Life(store.changes, contents, len(hubs))


def _options():
    return dict(key=None, max_to_keep=2, min_keep_secs=0)


def _published():
    """A publisher's life on an object store, with claims among it."""
    store = storage_cases.MemoryFileSystem()
    hub = publisher.Exchange("root", file_system=store, **_options())
    with hub.claim(0):
        return _life(store, [hub] * 4)


def _moved():
    """The same through a rename of directories that is not atomic."""
    life = _published()
    moved = []
    for path, content in life.changes:
        if content is not None:
            hidden = path.replace("group_0/", "group_0/.tmp-")
            moved += [(hidden, content), (hidden, None)]
        moved.append((path, content))
    return dataclasses.replace(life, changes=moved)


def _replaced():
    """A version is damaged, and published anew by another run."""
    store = storage_cases.MemoryFileSystem()
    hub = publisher.Exchange("root", file_system=store, **_options())
    _publish(hub, 1)
    _publish(hub, 2, b"A")
    store.write("root/group_0/2/variables/index", [b"indexX"])
    hub = publisher.Exchange("root", file_system=store, **_options())
    _publish(hub, 2, b"B")
    _publish(hub, 3)
    contents = {1: {b"1"}, 2: {b"A", b"B"}, 3: {b"3"}}
    return _Life(store.changes, contents, 3)


class _Follower:
    """A peer's reader, and what it took."""

    def __init__(self, view):
        self.view = view
        hub = publisher.Exchange("root", key=None, file_system=view)
        self.reader = follow.Follower(hub, 0, read=self._read, alone=True)
        self.taken = []

    def _read(self, version):
        names = version.manifest.files
        return {
            name: b"".join(self.view.blocks(f"{version.path}/{name}"))
            for name in names
        }

    def poll(self):
        try:
            self.reader.look()
            self.reader.stage()
        except OSError:
            pass  # As the polling thread does.
        if self.reader.state == follow.READY:
            staged = self.reader.take_staged()
            self.taken.append((staged.version.step, staged.values))
        elif self.reader.state == follow.FAILED:
            self.reader.reject(self.reader.announced)

    def check(self, contents):
        steps = [step for step, _ in self.taken]
        assert steps == sorted(set(steps))
        for step, values in self.taken:
            assert values in [
                {name: data + text for name, data in _SMALL.items()}
                for text in contents[step]
            ]


def test_any_order_of_changes_shows_whole_versions_or_none(caplog, monkeypatch):
    caplog.set_level("CRITICAL")
    # They are the same few ones; manifest_test reads all others.
    read = functools.cache(manifest.Manifest.from_json)
    monkeypatch.setattr(manifest.Manifest, "from_json", read)
    lives = [_published(), _moved(), _replaced()]
    seen = set()
    missed = 0
    for seed in range(_NUM_LIVES):
        rng = random.Random(seed)
        life = lives[seed % len(lives)]
        view = storage_cases.DelayedView(
            life.changes,
            rng,
            stale_looks=rng.choice((0, 0, 1, 3)),
            fail_share=rng.choice((0, 0, 0.02, 0.2)),
        )
        follower = _Follower(view)
        while not view.is_settled:
            view.advance(rng.randint(3, 30))
            follower.poll()
        view.settle()
        # A version whose files came late may have been given up just now;
        # it takes one more poll to be sure, and the one before is in use.
        for _ in range(3):
            follower.poll()
        follower.check(life.contents)
        seen.update(step for step, _ in follower.taken)
        missed += follower.reader.current != life.last_step
    assert seen == {1, 2, 3, 4}
    # Given up for good only after two looks that contradicted the manifest.
    assert missed < 0.05 * _NUM_LIVES


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ESTALE])
def test_one_failing_call_delays_a_teacher_by_one_poll(number):
    store = storage_cases.MemoryFileSystem()
    _life(store, [publisher.Exchange("root", file_system=store, key=None)] * 2)
    faults = storage_cases.Faults(store)
    _Follower(faults).poll()
    num_calls = len(faults.calls)
    assert num_calls > 10
    for fail_at in range(1, num_calls + 1):
        faults = storage_cases.Faults(
            store, fail_at=fail_at, error=OSError(number, "injected")
        )
        follower = _Follower(faults)
        for _ in range(2):
            follower.poll()
        assert len(faults.calls) >= fail_at
        # Step 1 was taken where step 2 could not be seen for a moment.
        assert follower.reader.current == 2, fail_at
        assert follower.reader.rejected == {}


# ---- versions that go while they are read ----


class _Reading(storage_cases.Faults):
    """Calls `when` at the n-th call."""

    left, when = 0, None

    def check(self, name, path):
        self.left -= 1
        if self.left == 0:
            self.when()


def _remove_all(root, hub):
    shutil.rmtree(root)


def _prune(root, hub):
    _publish(hub, 3)
    _publish(hub, 4)
    assert 2 not in hub.steps(0)


def _link(root, hub):
    shutil.move(f"{root}/group_0/2", f"{root}/moved")
    os.symlink(f"{root}/moved", f"{root}/group_0/2")


def _replace_by_file(root, hub):
    shutil.rmtree(f"{root}/group_0/2")
    pathlib.Path(root, "group_0", "2").write_text("a file")


@pytest.mark.parametrize(
    "happens", [_remove_all, _prune, _link, _replace_by_file]
)
def test_a_version_that_goes_at_any_stage_of_its_reading(happens, tmp_path):
    """The one in use stays, and what is published later is found."""
    call = fired = 0
    while fired == call:
        call += 1
        root = str(tmp_path / str(call))
        hub = publisher.Exchange(root, key=None, max_to_keep=2, min_keep_secs=0)
        _publish(hub, 1)

        def when(root=root, hub=hub):
            nonlocal fired
            fired += 1
            happens(root, hub)

        view = _Reading(filesystem.LocalFileSystem())
        view.when = when
        follower = _Follower(view)
        follower.reader._exchange = publisher.Exchange(
            root, key=None, file_system=view
        )
        follower.poll()
        assert follower.reader.current == 1
        _publish(hub, 2)
        view.left = call
        for _ in range(3):
            follower.poll()
            assert follower.reader.current >= 1
        view.left = 0
        _publish(hub, 9)
        for _ in range(2):
            follower.poll()
        assert follower.reader.current == 9
        follower.check({step: {b"%d" % step} for step in range(10)})
    assert call > 10


@pytest.mark.parametrize("in_store", [False, True])
def test_tensorflow_reads_what_was_verified(tmp_path, in_store):
    root = f"memory://{tmp_path.name}" if in_store else str(tmp_path)
    hub = publisher.Exchange(root, key=None)
    version = _publish(hub, 1)
    with hub.readable(version) as found:
        assert found.manifest == version.manifest
        assert found.is_copy is in_store is (found.path != version.path)
        assert pathlib.Path(found.path, "saved_model.pb").read_bytes()
    # The copy goes, and only the copy.
    assert pathlib.Path(found.path).exists() is not in_store
    hub.verify(version)
    storage, _ = filesystem.for_root(root)
    storage.write(f"{version.path}/saved_model.pb", [b"other"])
    with (
        pytest.raises(versions.CorruptVersionError, match="saved_model.pb"),
        hub.readable(version),
    ):
        pass


# ---- what else may lie there, and whose clocks are wrong ----


def test_foreign_files_links_and_pipes_beside_versions_are_ignored(tmp_path):
    hub = publisher.Exchange(tmp_path, max_to_keep=2, min_keep_secs=0)
    _publish(hub, 1)
    group = pathlib.Path(hub.group_path(0))
    (group / "notes.txt").write_text("mine")
    (group / "backup").mkdir()
    (group / "backup" / "saved_model.pb").write_text("mine")
    (group / "7").symlink_to(group / "1")
    (group / "dangling").symlink_to(group / "nowhere")
    (group / ".hidden").write_text("mine")
    os.mkfifo(group / "8")
    os.mkfifo(group / "pipe")
    (group / "9").mkdir()
    os.mkfifo(group / "9" / "manifest.json")
    (tmp_path / "readme").write_text("mine")
    for step in (2, 3):
        with hub.claim(0):
            _publish(hub, step)
        assert hub.latest(0).step == step
    assert hub.steps(0) == [2, 3]
    for name in ("notes.txt", "backup", "7", "dangling", ".hidden", "8", "9"):
        assert os.path.lexists(group / name), name
    assert (tmp_path / "readme").exists()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda text: "{", "must be JSON text"),
        (
            lambda text: text.replace('"format": 1', '"format": 2'),
            "the only manifest format this release knows",
        ),
    ],
    ids=["malformed", "of a later format"],
)
def test_a_newest_version_that_is_bad_is_passed_over_and_told_of_once(
    tmp_path, caplog, change, told
):
    hub = publisher.Exchange(tmp_path, **_options())
    for step in (1, 2):
        _publish(hub, step)
    path = tmp_path / "group_0" / "2" / "manifest.json"
    path.write_text(change(path.read_text()))
    for _ in range(5):
        assert hub.latest(0).step == 1
    (record,) = (r for r in caplog.records if r.levelname == "WARNING")
    assert str(path) in record.getMessage() and told in record.getMessage()


def test_a_clock_that_is_a_year_off_changes_nothing(tmp_path, monkeypatch):
    """The publisher's machine, its files' times, or the reader's."""
    skew_secs = -366 * 86400.0
    choices = []
    for skewed in (False, True):
        root = str(tmp_path / str(skewed))
        now = [1000.0]
        hub = publisher.Exchange(
            root, max_to_keep=2, min_keep_secs=60, clock=lambda now=now: now[0]
        )
        reader = publisher.Exchange(root)
        chosen = []
        for step in range(1, 7):
            with monkeypatch.context() as patch:
                true = time.time()
                if skewed and step % 2:
                    patch.setattr(time, "time", lambda t=true: t + skew_secs)
                version = _publish(hub, step)
            if skewed and step % 2:
                when = true + skew_secs
                assert abs(version.manifest.created - when) < 3600
                for path in (version.path, f"{version.path}/manifest.json"):
                    os.utime(path, (when, when))
            now[0] += 61.0
            chosen.append((reader.latest(0).step, hub.steps(0)))
        choices.append(chosen)
    assert choices[0] == choices[1]
    assert choices[0][-1] == (6, [5, 6])
