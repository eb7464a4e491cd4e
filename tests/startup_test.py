"""Tests of the start-up handshake, on both sides, with an invented clock."""

import pytest

from tfdistill import startup

NAMES = ("w0", "w1")


@pytest.fixture
def announce(tmp_path):
    def act(name, what):
        what({startup.VARIABLE: str(tmp_path / name)})

    return act


@pytest.fixture
def make_watch(tmp_path):
    def make(limit_secs):
        paths = {name: tmp_path / name for name in NAMES}
        return startup.StartWatch(paths, limit_secs=limit_secs, now=100.0)

    return make


def test_announcing_creates_the_two_files(tmp_path):
    path = tmp_path / "0_worker_0"
    startup.announce_starting({startup.VARIABLE: str(path)})
    assert [p.name for p in tmp_path.iterdir()] == ["0_worker_0.starting"]
    startup.announce_ready({startup.VARIABLE: str(path)})
    assert path.exists()


def test_announcing_without_a_launcher_does_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(startup.VARIABLE, raising=False)
    startup.announce_starting()
    startup.announce_ready({startup.VARIABLE: ""})
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
    announce("w0", startup.announce_starting)
    assert watch.late(NAMES, now=105.0) is None
    assert watch.late(NAMES, now=114.9) is None
    message = watch.late(NAMES, now=115.0)
    assert message.startswith("w1 did not appear")


def test_all_appear_but_do_not_connect(make_watch, announce):
    watch = make_watch(10)
    for name in NAMES:
        announce(name, startup.announce_starting)
    assert watch.late(NAMES, now=101.0) is None
    assert "w0, w1 appeared but did not conn" in watch.late(NAMES, now=111.0)


def test_one_ready_and_one_absent(make_watch, announce):
    watch = make_watch(10)
    announce("w0", startup.announce_ready)
    assert watch.late(NAMES, now=101.0) is None
    assert watch.late(NAMES, now=112.0).startswith("w1 did not appear")


def test_all_ready_ends_the_watch(make_watch, announce):
    watch = make_watch(10)
    for name in NAMES:
        announce(name, startup.announce_ready)
    assert watch.late(NAMES, now=101.0) is None
    assert watch.late(NAMES, now=1e9) is None
    assert watch.warning(now=1e9) is None


def test_a_task_that_ended_is_not_waited_for(make_watch, announce):
    watch = make_watch(10)
    announce("w0", startup.announce_ready)
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
    announce("w1", startup.announce_starting)
    watch.late(NAMES, now=101.0)
    assert watch.warning(now=106.0) is None


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
