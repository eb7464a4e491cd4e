import numpy as np
import pytest

from tfdistill import interval_means


def _running(values):
    """Keras' mean of an epoch, after each of its steps."""
    return np.cumsum(values) / np.arange(1, len(values) + 1)


def test_the_mean_of_the_steps_between_two_looks():
    values = np.array([4.0, 2.0, 6.0, 8.0, 1.0])
    means, running = interval_means.IntervalMeans(["loss"]), _running(values)
    means.begin(0)
    found = [
        means.take({"loss": running[done - 1], "x": 1}, num_done=done)
        for done in (2, 3, 5)
    ]
    expected = [values[:2], values[2:3], values[3:]]
    assert [f["loss"] for f in found] == pytest.approx(
        [part.mean() for part in expected]
    )


def test_nothing_is_told_of_steps_that_were_not_seen():
    means, running = interval_means.IntervalMeans(["loss"]), _running([5, 3, 1])
    means.begin(1)
    assert means.take({"loss": running[1]}, num_done=2) == {}
    assert means.take({"loss": running[2]}, num_done=3)["loss"] == 1.0


def test_no_step_is_no_mean():
    means = interval_means.IntervalMeans(["loss"])
    means.begin(0)
    assert means.take({"loss": 1.0}, num_done=0) == {}


def test_a_log_that_is_missing_is_left_out():
    means = interval_means.IntervalMeans(["loss", "task_loss"])
    means.begin(0)
    assert means.take({"task_loss": 2.0}, num_done=4) == {"task_loss": 2.0}


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
