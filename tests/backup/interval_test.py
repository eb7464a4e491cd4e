"""When backups are due by Young's interval."""

import math

import pytest

from tests.cases import backup as cases
from tfdistill.backup import interval as interval_lib

_STEP_SECS, _HELD_UP, _WRITE_SECS = 0.5, 0.02, 0.1


class _Training:
    """Steps of half a second, and backups that hold them up for a while."""

    def __init__(self):
        self.now, self.step, self.taken = 100.0, 0, []
        self.interval = interval_lib.YoungsInterval(
            lambda own: [own], clock=lambda: self.now
        )

    def train(self, num_steps, *, write_secs=_WRITE_SECS):
        for _ in range(num_steps):
            self.step += 1
            self.now += _STEP_SECS
            if self.interval.due(self.step):
                self._back_up(write_secs)
        return self.taken

    def _back_up(self, write_secs):
        begin = self.now
        with self.interval.holding_up():
            # The first one also traces.
            self.now += _HELD_UP if self.taken else 10.0
        with self.interval.writing():
            self.now += write_secs
        self.now = begin  # Training goes on beside it.
        self.taken.append(self.step)


@pytest.fixture
def training():
    return _Training()


def _young(mtbf_secs):
    cost = _HELD_UP + 0.1 * _WRITE_SECS
    return round(math.sqrt(2 * cost * mtbf_secs) / _STEP_SECS)


def _gaps(taken):
    return [b - a for a, b in zip(taken, taken[1:], strict=False)]


def test_it_assumes_a_failure_an_hour(training):
    taken = training.train(100)
    assert taken[:3] == [10, 20, 30]
    assert set(_gaps(taken[2:])) == {_young(3600.0)}


def test_failures_make_backups_more_frequent(training):
    training.interval.restore({"num_failures": 9, "secs": 600.0})
    # One a minute, or a bit less since the last one.
    assert _young(60.0) < 0.2 * _young(3600.0)
    assert set(_gaps(training.train(60)[2:])) == {_young(60.0)}
    assert training.interval.state() == {"num_failures": 10, "secs": 630.0}


def test_there_is_time_to_write_one_before_the_next(training):
    training.interval.restore({"num_failures": 999, "secs": 1000.0})
    taken = training.train(400, write_secs=30.0)
    assert set(_gaps(taken[3:])) == {120}


def test_none_is_due_while_one_is_written(training):
    training.train(10)
    with training.interval.writing():
        assert training.train(69) == [10]  # Asked at 20 and 40.
    assert training.train(21) == [10, 80, 90]


def test_the_chief_decides(training):
    training.interval = interval_lib.YoungsInterval(lambda own: [7, own])
    assert training.train(24) == [10, 17, 24]


@pytest.mark.deep
@pytest.mark.parametrize(
    ("data", "replicas"),
    [(cases.finite, 1), (cases.finite, 2), (cases.endless, 2)],
)
def test_all_replicas_take_them_and_resume_from_them(
    data, replicas, tmp_path, two_replicas, monkeypatch
):
    monkeypatch.setattr(interval_lib, "_FIRST_STEPS", 2)
    chosen = interval_lib.YoungsInterval._proposed
    monkeypatch.setattr(
        interval_lib.YoungsInterval,
        "_proposed",
        lambda self, secs: min(2, chosen(self, secs)),
    )
    fit = {"steps_per_epoch": 5} if data is cases.endless else {}
    case = cases.Case(data=data, fit=fit)
    strategy = two_replicas if replicas == 2 else None
    kwargs = {"strategy": strategy, "every_steps": None}
    whole, *_ = cases.train(case, strategy=strategy)
    _, _, first = cases.train(case, tmp_path, stop_after=9, **kwargs)
    assert first.resumed_step is None
    model, _, backup = cases.train(case, tmp_path, **kwargs)
    assert backup.resumed_step == 8
    assert backup.num_skipped == 0
    found, expected = (cases.values(m, strategy) for m in (model, whole))
    cases.assert_same(found, expected)
