"""A slow line between groups: what it delays, and who shares it."""

import json

import pytest

from tfdistill.exchange import filesystem
from tfdistill.exchange import link
from tfdistill.exchange import publisher

_SIZE = 10_000


class _Clock:
    """Time passes only for who waits."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def sleep(self, secs):
        self.now += secs


@pytest.fixture
def root(tmp_path):
    """An exchange of two groups below a directory that is called as one."""
    return str(tmp_path / "group_7" / "exchange")


def _line(tmp_path, *, mbit_per_s=0.0, delay_ms=0.0):
    return link.Link(
        mbit_per_s=mbit_per_s,
        delay_ms=delay_ms,
        group=0,
        file=str(tmp_path / "line"),
    )


def _publish(root, group):
    def write(directory):
        files = filesystem.LocalFileSystem()
        files.write(f"{directory}/saved_model.pb", [b"x" * _SIZE])

    exchange = publisher.Exchange(root, key=None)
    exchange.publish(write, group=group, step=1)


def _read(root, line, clock, group, *, deltas=False):
    """Finds a version and reads it, as a follower does; returns the time."""
    files = link.FarFiles(root, line, clock=clock, sleep=clock.sleep)
    exchange = publisher.Exchange(root, key=None, file_system=files)
    exchange = exchange.deltas if deltas else exchange
    before = clock.now
    with exchange.readable(exchange.latest(group)):
        return clock.now - before


def test_other_groups_files_take_their_time_and_own_ones_none(root, tmp_path):
    clock = _Clock()
    for group in (0, 1):
        _publish(root, group)
    line = _line(tmp_path, mbit_per_s=0.5)
    manifest = publisher.Exchange(root, key=None).open(1, 1).path
    size = filesystem.LocalFileSystem().stat(f"{manifest}/manifest.json").size
    taken = _read(root, line, clock, 1)
    assert taken == pytest.approx((_SIZE + size) * 8 / 0.5e6)
    assert _read(root, line, clock, 0) == 0
    exchange = publisher.Exchange(root, key=None)
    exchange.publish_delta([b"x" * _SIZE], group=1, step=2)
    assert _read(root, line, clock, 1, deltas=True) > _SIZE * 8 / 0.5e6
    # A list of versions, one of files before the version is read and one
    # after, the manifest and the file.
    line = _line(tmp_path, delay_ms=20.0)
    assert _read(root, line, clock, 1) == pytest.approx(5 * 0.02)


def test_tasks_of_a_group_share_the_line(root, tmp_path):
    """Each has a clock of its own, and both begin at the same time."""
    _publish(root, 1)
    line = _line(tmp_path, mbit_per_s=0.5)
    first, second = (_read(root, line, _Clock(), 1) for _ in range(2))
    assert second == pytest.approx(2 * first)


def test_the_environment_puts_the_line_there(root, tmp_path, monkeypatch):
    line = _line(tmp_path, mbit_per_s=1e6)
    (name, text), *others = line.to_env().items()
    assert not others and json.loads(text)["group"] == 0
    monkeypatch.setenv(name, text)
    _publish(root, 1)
    exchange = publisher.Exchange(root, key=None)
    with exchange.readable(exchange.latest(1)):
        assert float((tmp_path / "line").read_text()) > 0
