"""The window of scheduled calls, over a coordinator that does as it is told."""

import pytest

from tfdistill import executions


class _Result:
    def __init__(self, coordinator, value):
        self._coordinator, self._value = coordinator, value

    def get(self):
        self._coordinator.waited_for.append(self._value)
        if self._coordinator.error and self._value >= self._coordinator.fails:
            # What TensorFlow says of every call once one has failed.
            raise RuntimeError("cancelled")
        return self._value


class _Coordinator:
    def __init__(self):
        self.scheduled, self.waited_for, self.num_joins = [], [], 0
        self.error, self.fails = None, 0

    def schedule(self, function, args):
        self.scheduled.append((function, args))
        return _Result(self, function(*args))

    def join(self):
        self.num_joins += 1
        if self.error:
            raise self.error


@pytest.fixture
def coordinator():
    return _Coordinator()


def _double(value):
    return 2 * value


def test_results_come_in_the_order_of_scheduling_with_their_tags(coordinator):
    window = executions.Executions(coordinator, num_workers=3)
    assert (window.limit, len(window)) == (6, 0)
    for value in (5, 3, 4):
        window.schedule(_double, [value], tag=f"tag {value}")
    assert coordinator.scheduled == [(_double, (v,)) for v in (5, 3, 4)]
    assert (len(window), coordinator.waited_for) == (3, [])
    assert window.oldest() == ("tag 5", 10)
    assert coordinator.waited_for == [10]
    window.schedule(_double, [9])
    assert [window.oldest() for _ in range(3)] == [
        ("tag 3", 6),
        ("tag 4", 8),
        (None, 18),
    ]
    assert len(window) == 0


def test_run_schedules_all_and_yields_in_order(coordinator):
    window = executions.Executions(coordinator, num_workers=1)
    results = window.run(_double, [(value,) for value in (3, 1, 2)])
    assert next(results) == 6
    assert (len(coordinator.scheduled), len(window)) == (3, 2)
    assert list(results) == [2, 4]
    assert list(window.run(_double, [])) == []


def test_what_went_wrong_is_raised_and_not_the_cancellation(coordinator):
    window = executions.Executions(coordinator, num_workers=2)
    for value in (1, 2, 3):
        window.schedule(_double, [value])
    coordinator.error, coordinator.fails = ValueError("the data are bad"), 4
    assert window.oldest() == (None, 2)
    with pytest.raises(ValueError, match="the data are bad"):
        window.oldest()
    assert (len(window), coordinator.num_joins) == (0, 1)


def test_an_error_that_join_does_not_know_is_raised_as_it_is(coordinator):
    window = executions.Executions(coordinator, num_workers=2)
    window.schedule(_double, [1])
    coordinator.error, coordinator.fails = ValueError("lost"), 0
    coordinator.join = lambda: None
    with pytest.raises(RuntimeError, match="cancelled"):
        window.oldest()


@pytest.mark.parametrize("error", [None, ValueError("another")])
def test_cancel_forgets_waits_and_raises_nothing(coordinator, error):
    window = executions.Executions(coordinator, num_workers=2)
    window.schedule(_double, [1])
    coordinator.error = error
    window.cancel()
    assert (len(window), coordinator.num_joins) == (0, 1)
    assert coordinator.waited_for == []


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
