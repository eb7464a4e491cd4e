""""""

import logging

import pytest

from tfdistill.teachers import options
from tfdistill.teachers import slot


class _Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return _Clock()


def _health(clock, **bounds):
    health = slot.TeacherHealth("group_1", clock=clock)
    health.bounds = options.Bounds(**bounds)
    return health


def _status(health, in_use=True, rejected=None):
    return health.describe(in_use=in_use, rejected=rejected or {})


def test_before_there_is_a_version(clock):
    found = _status(_health(clock, max_secs=1), in_use=False)
    assert found["health"] == "absent" and found["step"] == -1
    assert found["age_steps"] is found["age_secs"] is None
    assert found["share"] == 0 and found["reason"] == ""


def test_a_version_ages_from_when_it_was_first_seen(clock):
    health = _health(clock, max_secs=10, ramp_secs=10)
    health.see(-1, 7)
    clock.now += 4
    health.see(7, 8)
    health.swapped(7, num_bytes=5)
    health.note_step(9)
    found = _status(health)
    assert (found["age_steps"], found["age_secs"]) == (2, 4.0)
    assert (found["health"], found["swaps"], found["bytes"]) == ("good", 1, 5)
    assert health.measured_share_by_secs() == 1
    clock.now += 11
    assert health.measured_share_by_secs() == 0.5
    # The next was first seen 11 s ago.
    health.swapped(8, num_bytes=5)
    assert _status(health)["age_secs"] == 11.0
    assert health.measured_share_by_secs() == 0.9


def test_ageing_is_told_once_for_each_turn(clock, caplog):
    health = _health(clock, max_steps=5, ramp_steps=2)
    health.swapped(10, num_bytes=1)
    with caplog.at_level(logging.WARNING):
        states = []
        for step in (15, 16, 16, 17, 18):
            health.note_step(step)
            states.append(_status(health)["health"])
    assert states == ["good", "fading", "fading", "too_stale", "too_stale"]
    assert len(caplog.records) == 2
    assert "is 6 steps and 0 s old" in caplog.messages[0]
    assert "counts less and less" in caplog.messages[0]
    assert "is 7 steps" in caplog.messages[1]
    assert "is left out" in caplog.messages[1]
    assert "max_staleness_steps=5" in _status(health)["reason"]
    assert _status(health)["too_stale"] is True
    health.swapped(17, num_bytes=1)
    health.note_step(18)
    assert _status(health)["health"] == "good"
    assert len(caplog.records) == 2


def test_seconds_count_as_the_group_agreed(clock, caplog):
    """By the chief's clock: this task's own is for its log alone."""
    health = _health(clock, max_secs=10)
    health.swapped(10, num_bytes=1)
    clock.now += 60
    health.note_step(11)
    assert _status(health)["health"] == "good"
    health.share_by_secs = 0.0
    health.note_step(12)
    assert "is 2 steps and 60 s old" in caplog.text
    assert _status(health)["health"] == "too_stale"


def test_what_was_dropped_is_counted_and_says_why(clock):
    health = _health(clock)
    health.swapped(10, num_bytes=1)
    health.dropped("its outputs were NaN.")
    found = _status(health, in_use=False, rejected={10: "its outputs ..."})
    assert (found["health"], found["num_dropped"]) == ("dropped", 1)
    assert found["reason"] == "its outputs were NaN." and found["share"] == 0
    health.swapped(11, num_bytes=1)
    found = _status(health)
    assert (found["health"], found["num_dropped"]) == ("good", 1)


def test_the_newest_quarantined_versions_are_told(clock):
    rejected = {step: f"reason {step}" for step in range(30)}
    found = _status(_health(clock), in_use=False, rejected=rejected)
    assert found["num_quarantined"] == 30
    assert list(found["quarantined"]) == list(range(20, 30))
    assert found["reason"] == "reason 29"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
