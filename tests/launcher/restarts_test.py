"""Tests of the plan by which failed groups start again; times are invented."""

import pytest

from tfdistill.launcher import restarts as restarts_lib


class _Clock:
    """Shows the time that it is set to."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return _Clock()


def _plan(restarts, exit_code=1, *, port_taken=False):
    return restarts.plan_after(exit_code, port_taken=port_taken)


def test_delays_double_up_to_a_bound_until_the_restarts_are_over(clock):
    restarts = restarts_lib.GroupRestarts(limit=7, clock=clock)
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
    assert "7 restarts (--max_restarts) are over" in text
    clock.now += 1e9
    assert not restarts.is_due


def test_the_delay_is_short_again_after_a_healthy_while(clock):
    restarts = restarts_lib.GroupRestarts(limit=20, clock=clock)
    for _ in range(3):
        _plan(restarts)
        restarts.note_start()
    clock.now = restarts_lib.HEALTHY_SECS - 1
    assert _plan(restarts)[0] == 4.0
    clock.now = 100.0
    restarts.note_start()
    clock.now = 100.0 + restarts_lib.HEALTHY_SECS
    assert _plan(restarts)[0] == 0.5
    # Those made count all the same.
    assert restarts.made == 5


@pytest.mark.parametrize(
    "exit_code, what", [(2, "wrong options"), (65, "wrong data")]
)
def test_what_would_fail_again_is_not_started_again(exit_code, what):
    restarts = restarts_lib.GroupRestarts(limit=3)
    delay, text = _plan(restarts, exit_code)
    assert delay is None
    assert f"exit code {exit_code} means {what}" in text
    assert restarts.made == 0


def test_a_taken_port_does_not_count_but_is_not_tried_for_ever():
    restarts = restarts_lib.GroupRestarts(limit=0)
    for start in (2, 3):
        delay, text = _plan(restarts, port_taken=True)
        assert delay == 0.0 and "on others" in text
        assert restarts.is_due
        restarts.note_start()
        assert (restarts.made, restarts.num_starts) == (0, start)
    assert _plan(restarts, port_taken=True) == (None, "")


def _worker_restarts(limit, clock, names=("a", "b")):
    return restarts_lib.WorkerRestarts(names, limit=limit, clock=clock)


def test_a_worker_is_due_after_a_delay_that_doubles_up_to_a_bound(clock):
    restarts = _worker_restarts(20, clock)
    delays = []
    for number in range(20):
        delay = restarts.note_end("a")
        assert restarts.is_known_dead("a") and not restarts.is_known_dead("b")
        assert restarts.made["a"] == number  # The planned one does not count.
        clock.now += delay - 0.01
        assert restarts.due() == []
        clock.now += 0.02
        assert restarts.due() == ["a"]
        restarts.note_start("a")
        assert restarts.due() == []
        delays.append(delay)
    assert delays[:6] == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert set(delays[6:]) == {10.0}
    assert restarts.made == {"a": 20, "b": 0}


def test_once_one_is_given_up_no_other_is_started_again(clock):
    restarts = _worker_restarts(1, clock, "abc")
    assert restarts.note_end("a") == 1.0
    restarts.note_start("a")
    assert restarts.note_end("b") == 1.0
    assert restarts.note_end("a") is None
    assert restarts.is_known_dead("a") and restarts.is_known_dead("b")
    clock.now = 1e9
    assert restarts.due() == []
    assert not restarts.none_left
    assert restarts.note_end("c") is None
    assert restarts.none_left
    assert restarts.made == {"a": 1, "b": 0, "c": 0}
