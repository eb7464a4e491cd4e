"""Tests of how the benchmark of recoveries counts."""

from benchmarks import recovery


def test_the_longest_pause_is_that_of_the_period():
    steps = [(1, 0.0), (2, 9.0), (3, 9.5), (4, 11.5), (3, 12.0), (4, 20.0)]
    assert recovery.longest_gap(steps, since=9.0, until=12.0) == 2.0
    assert recovery.longest_gap(steps, since=0.0, until=99.0) == 9.0
