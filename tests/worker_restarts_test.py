"""Tests of the plan by which dead workers start again; times are invented."""

import pytest

from tfdistill import worker_restarts


def _restarts(limit):
    return worker_restarts.WorkerRestarts(["a", "b"], limit=limit)


def test_a_worker_is_due_after_a_delay_that_doubles_up_to_a_bound():
    restarts = _restarts(20)
    delays = []
    for _ in range(20):
        delay = restarts.note_end("a", now=100.0)
        assert restarts.is_known_dead("a") and not restarts.is_known_dead("b")
        assert restarts.due(now=100.0 + delay - 0.01) == []
        assert restarts.due(now=100.0 + delay) == ["a"]
        restarts.note_restart("a", now=100.0)
        assert restarts.due(now=1e9) == []
        delays.append(delay)
    assert delays[:6] == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert set(delays[6:]) == {10.0}
    assert restarts.made == {"a": 20, "b": 0}


def test_the_delay_is_short_again_after_a_worker_has_worked():
    restarts = _restarts(20)
    for now in (0.0, 59.0, 110.0):
        restarts.note_end("a", now=now)
        restarts.note_restart("a", now=now)
    assert restarts.note_end("a", now=169.0) == 8.0
    restarts.note_restart("a", now=180.0)
    assert restarts.note_end("a", now=240.0) == 1.0
    assert restarts.made["a"] == 4


def test_once_one_is_given_up_no_other_is_started_again():
    restarts = worker_restarts.WorkerRestarts(["a", "b", "c"], limit=1)
    assert restarts.note_end("a", now=0.0) == 1.0
    restarts.note_restart("a", now=1.0)
    assert restarts.note_end("b", now=5.0) == 1.0
    assert restarts.note_end("a", now=5.5) is None
    assert restarts.is_known_dead("a") and restarts.is_known_dead("b")
    assert restarts.due(now=1e9) == []
    assert not restarts.none_left
    assert restarts.note_end("c", now=6.0) is None
    assert restarts.none_left
    assert restarts.made == {"a": 1, "b": 0, "c": 0}


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
