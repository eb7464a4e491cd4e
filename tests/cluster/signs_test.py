"""Tests of how a task reports its progress, on both sides."""

import pytest

from tfdistill.cluster import signs
from tfdistill.launcher import watches
from tfdistill.system import processes


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


def test_all_phases_fit_into_the_line(reporter, ready_path):
    phases = [
        value
        for name, value in vars(signs).items()
        if name[0].isupper() and isinstance(value, str)
    ]
    phases.remove(signs.VARIABLE)
    assert len(phases) == 17  # With the parts of a start.
    for phase in phases:
        reporter.say(phase)
        assert signs.read_progress(ready_path).phase == phase


def test_the_parts_of_a_start_add_up(ready_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(processes, "boot_secs", lambda: now[0])
    monkeypatch.setattr(processes, "own_start_secs", lambda: 100.0)
    start = signs.Start({signs.VARIABLE: str(ready_path)})
    assert signs.read_parts(ready_path) is None
    for secs, part in (
        (101.0, signs.STRATEGY),
        (103.0, signs.FIRST_BATCH),
        (104.0, signs.TRACING),
        (107.0, signs.FIRST_BATCH),
    ):
        now[0] = secs
        start.begin(part)
        assert signs.read_parts(ready_path)[0] == part
    now[0] = 107.5
    start.end()
    now[0] = 999.0
    start.end()  # A later step.
    assert signs.read_parts(ready_path) == (
        None,
        {"imports": 1.0, "strategy": 2.0, "first step": 1.5, "tracing": 3.0},
    )


def test_an_inner_call_returns_to_the_phase_of_the_outer(reporter, ready_path):
    reporter.say(signs.EPOCH_END)
    with pytest.raises(KeyError), reporter.returning():
        reporter.say(signs.EVALUATION_STEP)
        raise KeyError
    assert signs.read_progress(ready_path).phase == signs.EPOCH_END


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


@pytest.mark.parametrize("text", ["", "x", "x step\n", "\xff\n"])
def test_what_is_no_report_is_ignored(ready_path, text):
    path = ready_path.with_name(ready_path.name + signs.SUFFIXES[-1])
    path.write_bytes(text.encode("latin-1"))
    assert signs.read_progress(ready_path) is None


NAMES = ("w0", "w1")


@pytest.fixture
def announce(tmp_path):
    def act(name, what):
        what({signs.VARIABLE: str(tmp_path / name)})

    return act


@pytest.fixture
def make_watch(tmp_path):
    def make(limit_secs):
        paths = {name: tmp_path / name for name in NAMES}
        return watches.StartLimit(paths, limit_secs=limit_secs, now=100.0)

    return make


def test_announcing_creates_the_two_files(tmp_path):
    path = tmp_path / "0_worker_0"
    signs.announce_starting({signs.VARIABLE: str(path)})
    assert [p.name for p in tmp_path.iterdir()] == ["0_worker_0.starting"]
    signs.announce_ready({signs.VARIABLE: str(path)})
    assert path.exists()


def test_announcing_without_a_launcher_does_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(signs.VARIABLE, raising=False)
    signs.announce_starting()
    signs.announce_ready({signs.VARIABLE: ""})
    assert list(tmp_path.iterdir()) == []


def test_nobody_appears(make_watch):
    watch = make_watch(10)
    assert watch.late(NAMES, now=109.9) is None
    message = watch.late(NAMES, now=110.0)
    assert "w0, w1 did not appear within 10 s" in message
    assert "--start_timeout_secs" in message
    assert watch.late(NAMES, now=200.0) is None  # Said once.


def test_one_missing_is_named_from_when_the_first_appeared(
    make_watch, announce
):
    watch = make_watch(10)
    announce("w0", signs.announce_starting)
    assert watch.late(NAMES, now=105.0) is None
    assert watch.late(NAMES, now=114.9) is None
    message = watch.late(NAMES, now=115.0)
    assert message.startswith("w1 did not appear")


def test_all_appear_but_do_not_connect(make_watch, announce):
    watch = make_watch(10)
    for name in NAMES:
        announce(name, signs.announce_starting)
    assert watch.late(NAMES, now=101.0) is None
    assert "w0, w1 appeared but did not conn" in watch.late(NAMES, now=111.0)


def test_one_ready_and_one_absent(make_watch, announce):
    watch = make_watch(10)
    announce("w0", signs.announce_ready)
    assert watch.late(NAMES, now=101.0) is None
    assert watch.late(NAMES, now=112.0).startswith("w1 did not appear")


def test_all_ready_ends_the_watch(make_watch, announce):
    watch = make_watch(10)
    for name in NAMES:
        announce(name, signs.announce_ready)
    assert watch.late(NAMES, now=101.0) is None
    assert watch.late(NAMES, now=1e9) is None
    assert watch.warning(now=1e9) is None


def test_a_task_that_ended_is_not_waited_for(make_watch, announce):
    watch = make_watch(10)
    announce("w0", signs.announce_ready)
    assert watch.late(["w0"], now=500.0) is None
    assert watch.late([], now=500.0) is None


def test_no_limit(make_watch):
    watch = make_watch(0)
    assert watch.late(NAMES, now=1e9) is None
    assert watch.warning(now=1e9) is None


def test_warning_at_half_the_limit_once(make_watch, announce):
    watch = make_watch(10)
    assert watch.warning(now=104.9) is None
    assert "--start_timeout_secs=0" in watch.warning(now=105.0)
    assert watch.warning(now=106.0) is None
    watch = make_watch(10)
    announce("w1", signs.announce_starting)
    watch.late(NAMES, now=101.0)
    assert watch.warning(now=106.0) is None
