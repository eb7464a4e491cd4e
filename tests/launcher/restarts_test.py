"""Tests of the plan by which failed groups start again; times are invented."""

import pytest

from tfdistill.launcher import restarts as restarts_lib


def _plan(restarts, exit_code=1, *, port_taken=False):
    return restarts.plan_after(exit_code, port_taken=port_taken)


def test_delays_double_up_to_a_bound_until_the_restarts_are_over(clock):
    restarts = restarts_lib.Restarts(limit=7, clock=clock)
    delays = []
    for number in range(1, 8):
        delay, text = _plan(restarts)
        assert text == f"restart {number} of 7 in {delay:g} s"
        clock.now += delay - 0.01
        assert not restarts.is_due
        clock.now += 0.02
        assert restarts.is_due
        restarts.note_start()
        assert not restarts.is_due
        delays.append(delay)
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert (restarts.made, restarts.num_starts) == (7, 8)
    delay, text = _plan(restarts)
    assert delay is None
    assert "7 restarts (--max-restarts) are used up" in text
    clock.now += 1e9
    assert not restarts.is_due


def test_what_was_healthy_for_a_while_starts_again_at_once(clock):
    restarts = restarts_lib.Restarts(limit=20, clock=clock)
    for _ in range(3):
        _plan(restarts)
        restarts.note_start()
    clock.now = restarts_lib.HEALTHY_SECS - 1
    assert _plan(restarts)[0] == 4.0
    clock.now = 100.0
    restarts.note_start()
    clock.now = 100.0 + restarts_lib.HEALTHY_SECS
    assert _plan(restarts)[0] == 0.0
    assert restarts.is_due
    restarts.note_start()
    assert _plan(restarts)[0] == 0.5
    # Those made count all the same.
    assert restarts.made == 6


@pytest.mark.parametrize(
    "exit_code, what", [(2, "wrong options"), (65, "wrong data")]
)
def test_what_would_fail_again_is_not_started_again(exit_code, what):
    restarts = restarts_lib.Restarts(limit=3)
    delay, text = _plan(restarts, exit_code)
    assert delay is None
    assert f"exit code {exit_code} means {what}" in text
    assert restarts.made == 0


def test_a_taken_port_does_not_count_but_is_not_tried_for_ever():
    restarts = restarts_lib.Restarts(limit=0)
    for start in (2, 3):
        delay, text = _plan(restarts, port_taken=True)
        assert delay == 0.0 and "on other ports" in text
        assert restarts.is_due
        restarts.note_start()
        assert (restarts.made, restarts.num_starts) == (0, start)
    assert _plan(restarts, port_taken=True) == (None, "")
