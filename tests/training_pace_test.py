import pytest

from tfdistill import training_pace
from tfdistill import work_times


class _Clock:
    now = 100.0

    def __call__(self):
        return self.now


class _Blocking:
    def __init__(self, clock):
        self.blocked = work_times.WorkTimes(clock)


@pytest.fixture
def clock():
    return _Clock()


def test_evaluations_do_not_count(clock):
    pace = training_pace.TrainingPace(clock)
    pace.add(2, 20.0)
    clock.now += 4.0
    pace.pause()
    clock.now += 100.0
    pace.go_on()
    clock.now += 1.0
    pace.add(3, 30.0)
    found = pace.take()
    assert found["host/examples_per_second"] == 10.0
    assert found["host/step_secs"] == 1.0
    # Measured anew.
    assert pace.take() == {}


def test_a_look_while_paused_counts_up_to_the_pause(clock):
    pace = training_pace.TrainingPace(clock)
    pace.add(1, 4.0)
    clock.now += 2.0
    pace.pause()
    clock.now += 50.0
    assert pace.take()["host/step_secs"] == 2.0
    clock.now += 50.0
    pace.go_on()
    pace.add(1, 4.0)
    clock.now += 1.0
    assert pace.take()["host/step_secs"] == 1.0


def test_the_share_of_time_for_which_training_was_held_up(clock):
    one, other = _Blocking(clock), _Blocking(clock)
    pace = training_pace.TrainingPace(clock)
    pace.begin([one, other])
    for callback in (one, other):
        with callback.blocked.measured():
            clock.now += 1.0
    clock.now += 6.0
    pace.add(1, 1.0)
    assert pace.take()["exchange/blocked_share"] == 0.25
    clock.now += 1.0
    pace.add(1, 1.0)
    assert pace.take()["exchange/blocked_share"] == 0.0


def test_work_that_fails_is_measured(clock):
    times = work_times.WorkTimes(clock)
    assert times.last_secs is None
    with pytest.raises(OSError), times.measured():
        clock.now += 3.0
        raise OSError("disk")
    with times.measured():
        clock.now += 1.0
    assert (times.last_secs, times.total_secs) == (1.0, 4.0)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
