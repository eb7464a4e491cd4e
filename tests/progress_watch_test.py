"""Tests of when a task that reports progress is stuck; times are invented."""

import pytest

from tfdistill import progress
from tfdistill import progress_watch


class _Task:
    """A task under watch that takes given times."""

    def __init__(self, stuck_secs=8.0):
        self.watch = progress_watch.ProgressWatch(stuck_secs=stuck_secs)
        self.now = 50.0
        self._count = 0

    def do(self, phase, secs, *, times=1):
        """Enters a phase and is silent in it for a while."""
        for _ in range(times):
            self._count += 1
            self.watch.note(progress.Line(phase, self._count), now=self.now)
            self.now += secs

    def limit(self, phase):
        self.do(phase, 0.0)
        return self.watch.limit_secs()


def test_a_task_that_says_nothing_is_not_judged():
    watch = progress_watch.ProgressWatch(stuck_secs=8.0)
    watch.note(None, now=0.0)
    assert watch.phase == progress.IDLE
    assert not watch.is_stuck(now=1e9)


def test_quick_steps_have_the_least_limit():
    task = _Task()
    task.do(progress.FIRST_STEP, 3.0)
    task.do(progress.STEP, 0.2, times=50)
    task.do(progress.STEP, 7.9)
    assert not task.watch.is_stuck(now=task.now)
    assert task.watch.is_stuck(now=task.now + 0.2)
    assert task.watch.silent_secs(now=task.now) == pytest.approx(7.9)


def test_the_limit_follows_slow_steps_both_ways():
    task = _Task()
    task.do(progress.FIRST_STEP, 1.0)
    task.do(progress.STEP, 2.0)
    assert task.limit(progress.STEP) == 20.0
    # Five times the load is not yet a hang, and counts from then on.
    task.do(progress.STEP, 10.0)
    assert not task.watch.is_stuck(now=task.now)
    assert task.limit(progress.STEP) == 100.0
    task.do(progress.STEP, 0.5, times=600)
    assert task.limit(progress.STEP) == 8.0


def test_a_step_may_trace_again():
    task = _Task()
    task.do(progress.FIRST_STEP, 60.0)
    task.do(progress.STEP, 0.1, times=5)
    assert task.limit(progress.STEP) == 120.0


def test_what_was_never_seen_may_take_long():
    task = _Task()
    task.do(progress.FIRST_STEP, 599.0)
    assert not task.watch.is_stuck(now=task.now)
    assert task.watch.is_stuck(now=task.now + 2.0)
    # Then it is known: the next epoch begins as the first did, or faster.
    assert task.limit(progress.FIRST_STEP) == 5990.0


@pytest.mark.parametrize("phase", [progress.CALLBACKS, progress.EPOCH_END])
def test_callbacks_may_always_take_long(phase):
    task = _Task()
    task.do(progress.STEP, 0.1, times=3)
    task.do(phase, 0.01, times=100)
    assert task.limit(phase) == 600.0
    task.do(phase, 300.0)
    assert task.limit(phase) == 3000.0
    assert task.limit(progress.STEP) == 8.0


def test_outside_the_library_nothing_is_judged():
    task = _Task()
    task.do(progress.STEP, 0.1, times=3)
    task.do(progress.IDLE, 1e6)
    assert not task.watch.is_stuck(now=task.now)


def test_it_can_be_switched_off():
    task = _Task(stuck_secs=0.0)
    task.do(progress.STEP, 0.1, times=3)
    assert not task.watch.is_stuck(now=task.now + 1e9)


def test_an_excused_silence_neither_counts_nor_lengthens_the_limit():
    task = _Task()
    task.do(progress.STEP, 0.1, times=3)
    task.do(progress.STEP, 500.0)
    task.watch.excuse(now=task.now)
    assert not task.watch.is_stuck(now=task.now + 7.0)
    assert task.watch.is_stuck(now=task.now + 9.0)
    task.do(progress.STEP, 0.1)
    assert task.limit(progress.STEP) == 8.0


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
