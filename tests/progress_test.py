"""Tests of how a task reports its progress, on both sides."""

import pytest

from tfdistill import progress
from tfdistill import startup


@pytest.fixture
def ready_path(tmp_path):
    return tmp_path / "0_worker_0"


@pytest.fixture
def reporter(ready_path):
    return progress.Reporter({startup.VARIABLE: str(ready_path)})


def test_the_last_word_is_read_wherever_the_writer_is(reporter, ready_path):
    assert progress.read(ready_path) is None
    assert reporter.is_heard
    for phase in (progress.FIRST_EVALUATION_STEP, progress.STEP):
        reporter.say(phase)
    # Shorter than the one before, of which nothing is left.
    assert progress.read(ready_path) == progress.Line(progress.STEP, 2)
    reporter.say(progress.STEP)
    assert progress.read(ready_path) == progress.Line(progress.STEP, 3)


def test_all_phases_fit_into_the_line(reporter, ready_path):
    phases = [v for k, v in vars(progress).items() if k.isupper()]
    phases = [p for p in phases if isinstance(p, str) and p != ".progress"]
    assert len(phases) == 10
    for phase in phases:
        reporter.say(phase)
        assert progress.read(ready_path).phase == phase


def test_an_inner_call_returns_to_the_phase_of_the_outer(reporter, ready_path):
    reporter.say(progress.EPOCH_END)
    with pytest.raises(KeyError), reporter.returning():
        reporter.say(progress.EVALUATION_STEP)
        raise KeyError
    assert progress.read(ready_path).phase == progress.EPOCH_END


def test_without_a_launcher_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for environ in ({}, {startup.VARIABLE: ""}):
        reporter = progress.Reporter(environ)
        reporter.say(progress.STEP)
        assert not reporter.is_heard
    assert list(tmp_path.iterdir()) == []


def test_who_cannot_write_is_not_taken_for_silent(
    reporter, ready_path, monkeypatch
):
    reporter.say(progress.STEP)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    reporter.say(progress.STEP)
    assert progress.read(ready_path) is None
    assert not reporter.is_heard


@pytest.mark.parametrize("text", ["", "x", "x step\n", "\xff\n"])
def test_what_is_no_report_is_ignored(ready_path, text):
    path = ready_path.with_name(ready_path.name + progress.SUFFIX)
    path.write_bytes(text.encode("latin-1"))
    assert progress.read(ready_path) is None


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
