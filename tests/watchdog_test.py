import socket
import time

import pytest

from tfdistill import watchdog


def _wait_until(condition, limit_secs=10.0):
    deadline = time.monotonic() + limit_secs
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_silence_ends_the_process_with_an_explanation(capfd):
    ended = []
    with watchdog.Watchdog(0.1, lambda: "waited for b", end=ended.append):
        assert _wait_until(lambda: ended)
    assert ended == [75]
    printed = capfd.readouterr().err
    assert "tfdistill: waited for b" in printed
    # Where each thread stands, to see what hangs.
    assert "test_silence_ends_the_process" in printed


def test_progress_keeps_it_quiet():
    ended, now = [], [0.0]
    dog = watchdog.Watchdog(
        0.2, lambda: "", end=ended.append, clock=lambda: now[0]
    )
    with dog:
        for _ in range(30):
            now[0] += 0.15
            dog.touch()
            time.sleep(0.01)
        assert not ended
        now[0] += 0.3
        assert _wait_until(lambda: ended)


@pytest.mark.parametrize("limit_secs", [0.0, 0.05])
def test_no_limit_and_a_clean_exit_end_nothing(limit_secs):
    ended = []
    with watchdog.Watchdog(limit_secs, lambda: "", end=ended.append):
        pass
    time.sleep(0.2)
    assert not ended


def test_limits_come_from_the_environment(monkeypatch):
    monkeypatch.delenv("TFDISTILL_STALL_TIMEOUT_SECS", raising=False)
    name = "TFDISTILL_STALL_TIMEOUT_SECS"
    assert watchdog.limit_from_env(name, 7.0) == 7.0
    monkeypatch.setenv(name, "2.5")
    assert watchdog.limit_from_env(name, 7.0) == 2.5
    for wrong in ("soon", "-1", "inf", "nan"):
        monkeypatch.setenv(name, wrong)
        with pytest.raises(ValueError, match=f"{name} must be .*{wrong}"):
            watchdog.limit_from_env(name, 7.0)


def test_addresses_that_nobody_listens_at_are_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = f"127.0.0.1:{server.getsockname()[1]}"
        with socket.create_server(("127.0.0.1", 0)) as closed:
            gone = f"127.0.0.1:{closed.getsockname()[1]}"
        assert watchdog.unreachable([there, gone]) == [gone]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
