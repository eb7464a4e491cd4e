"""Tests of how a task reports its progress, on both sides."""

import pytest

from tfdistill.cluster import signs


@pytest.fixture
def ready_path(tmp_path):
    return tmp_path / "0_worker_0"


@pytest.fixture
def reporter(ready_path):
    return signs.Reporter({signs.VARIABLE: str(ready_path)})


def test_the_last_word_is_read_wherever_the_writer_is(reporter, ready_path):
    assert signs.read_progress(ready_path) is None
    assert reporter.is_heard
    for phase in (signs.FIRST_EVALUATION_STEP, signs.STEP):
        reporter.say(phase)
    # Shorter than the one before, of which nothing is left.
    assert signs.read_progress(ready_path) == signs.Line(signs.STEP, 2)
    reporter.say(signs.STEP)
    assert signs.read_progress(ready_path) == signs.Line(signs.STEP, 3)


def test_without_a_launcher_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for environ in ({}, {signs.VARIABLE: ""}):
        reporter = signs.Reporter(environ)
        reporter.say(signs.STEP)
        assert not reporter.is_heard
    assert list(tmp_path.iterdir()) == []


def test_who_cannot_write_is_not_taken_for_silent(
    reporter, ready_path, monkeypatch
):
    reporter.say(signs.STEP)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    reporter.say(signs.STEP)
    assert signs.read_progress(ready_path) is None
    assert not reporter.is_heard
