"""Tests of the clock that leaves out its owner's sleep."""

import pytest

from tfdistill import awake_clock


def test_time_asleep_counts_one_second_at_most():
    now = [100.0]
    clock = awake_clock.AwakeClock(lambda: now[0])
    readings = []
    for step in (0.0, 0.2, 0.9, 30.0, 0.5):
        now[0] += step
        readings.append(clock.read())
    assert readings == pytest.approx([0.0, 0.2, 1.1, 2.1, 2.6])


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
