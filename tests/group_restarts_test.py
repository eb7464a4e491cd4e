"""Tests of the plan by which failed groups start again; times are invented."""

import pytest

from tfdistill import group_restarts


def _restarts(limit):
    return group_restarts.GroupRestarts(limit=limit, now=0.0)


def _plan(restarts, exit_code=1, *, now=0.0, port_taken=False):
    return restarts.plan(exit_code, port_taken=port_taken, now=now)


def test_delays_double_up_to_a_bound_until_the_restarts_are_over():
    restarts = _restarts(7)
    delays = []
    for number in range(1, 8):
        delay, text = _plan(restarts)
        assert text == f"restart {number} of 7 in {delay:g} s"
        assert not restarts.is_due(now=delay - 0.01)
        assert restarts.is_due(now=delay)
        restarts.note_start(now=0.0)
        assert not restarts.is_due(now=1e9)
        delays.append(delay)
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert (restarts.made, restarts.num_starts) == (7, 8)
    delay, text = _plan(restarts)
    assert delay is None
    assert "7 restarts (--max_restarts) are over" in text
    assert not restarts.is_due(now=1e9)


def test_the_delay_is_short_again_after_a_healthy_while():
    restarts = _restarts(20)
    for _ in range(3):
        _plan(restarts)
        restarts.note_start(now=0.0)
    assert _plan(restarts, now=59.0)[0] == 4.0
    restarts.note_start(now=100.0)
    assert _plan(restarts, now=160.0)[0] == 0.5
    # Those made count all the same.
    assert restarts.made == 5


@pytest.mark.parametrize(
    "exit_code, what", [(2, "wrong options"), (65, "wrong data")]
)
def test_what_would_fail_again_is_not_started_again(exit_code, what):
    restarts = _restarts(3)
    delay, text = _plan(restarts, exit_code)
    assert delay is None
    assert f"exit code {exit_code} means {what}" in text
    assert restarts.made == 0


def test_without_restarts_there_is_nothing_to_say():
    assert _plan(_restarts(0)) == (None, "")


def test_a_taken_port_does_not_count_but_is_not_tried_for_ever():
    restarts = _restarts(0)
    for start in (2, 3):
        delay, text = _plan(restarts, port_taken=True)
        assert delay == 0.0 and "on others" in text
        assert restarts.is_due(now=0.0)
        restarts.note_start(now=0.0)
        assert (restarts.made, restarts.num_starts) == (0, start)
    assert _plan(restarts, port_taken=True) == (None, "")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
