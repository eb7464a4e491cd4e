"""A teacher's record: its age, its health and what was put in place."""

import logging
import types

import pytest

from tfdistill.teachers import options
from tfdistill.teachers import teacher as teacher_lib


class _Clock:
    now = 100.0

    def __call__(self):
        return self.now


class _Reader:
    """A peer's reader, as far as a teacher asks it."""

    def __init__(self):
        self.current = self.proposal = self.announced = -1
        self.rejected = {}
        self.next = None

    def take(self):
        self.current = self.next
        version = types.SimpleNamespace(step=self.next, num_bytes=5)
        return types.SimpleNamespace(version=version, values=[])

    def reject(self, step, reason):
        self.rejected[step] = reason


@pytest.fixture
def clock():
    return _Clock()


def _teacher(clock, **bounds):
    teacher = teacher_lib.Teacher(
        "group_1", None, options.TeacherOptions(**bounds), clock=clock
    )
    teacher.reader = _Reader()
    return teacher


def _swap(teacher, step):
    teacher.reader.next = step
    assert not teacher.swap()


def test_before_there_is_a_version(clock):
    found = _teacher(clock, max_staleness_secs=1).status
    assert found["health"] == "absent" and found["step"] == -1
    assert found["age_steps"] is found["age_secs"] is None
    assert found["share"] == 0 and found["reason"] == ""


def test_a_version_ages_from_when_it_was_first_seen(clock):
    teacher = _teacher(clock, max_staleness_secs=10)
    teacher.reader.announced = 7
    teacher.note_news()
    clock.now += 4
    teacher.reader.proposal = 8
    teacher.note_news()
    _swap(teacher, 7)
    teacher.note_step(9)
    found = teacher.status
    assert (found["age_steps"], found["age_secs"]) == (2, 4.0)
    assert (found["health"], found["swaps"], found["bytes"]) == ("good", 1, 5)
    clock.now += 11
    assert teacher.measured_age_ms == 15_000
    # The next was first seen 11 s ago.
    _swap(teacher, 8)
    assert teacher.status["age_secs"] == 11.0
    assert teacher.measured_age_ms == 11_000


def test_without_a_bound_by_seconds_none_are_agreed_on(clock):
    teacher = _teacher(clock, max_staleness_steps=3)
    _swap(teacher, 7)
    clock.now += 11
    assert teacher.measured_age_ms == 0 and teacher.status["age_secs"] == 11.0


def test_ageing_is_logged_once_for_each_turn(clock, caplog):
    teacher = _teacher(clock, max_staleness_steps=5, staleness_ramp_steps=2)
    _swap(teacher, 10)
    with caplog.at_level(logging.WARNING):
        states = []
        for step in (15, 16, 16, 17, 18):
            teacher.note_step(step)
            states.append(teacher.status["health"])
    assert states == ["good", "fading", "fading", "too_stale", "too_stale"]
    assert len(caplog.records) == 2
    assert "is 6 steps and 0 s old" in caplog.messages[0]
    assert "counts less and less" in caplog.messages[0]
    assert "is 7 steps" in caplog.messages[1]
    assert "is left out" in caplog.messages[1]
    assert "max_staleness_steps=5" in teacher.status["reason"]
    assert teacher.status["too_stale"] is True
    _swap(teacher, 17)
    teacher.note_step(18)
    assert teacher.status["health"] == "good"
    assert len(caplog.records) == 2


def test_seconds_count_as_the_group_agreed(clock, caplog):
    """By the chief's clock: this task's own is for its log alone."""
    teacher = _teacher(clock, max_staleness_secs=10, staleness_ramp_secs=10)
    _swap(teacher, 10)
    clock.now += 60
    teacher.note_step(11)
    assert teacher.status["health"] == "good"
    teacher.age_ms = 15_000
    assert teacher.share == 0.5
    teacher.age_ms = 20_000
    teacher.note_step(12)
    assert "is 2 steps and 60 s old" in caplog.text
    assert teacher.status["health"] == "too_stale"


def test_what_was_dropped_is_counted_and_says_why(clock):
    teacher = _teacher(clock)
    _swap(teacher, 10)
    teacher.drop("its outputs were NaN.")
    found = teacher.status
    assert (found["health"], found["num_dropped"]) == ("dropped", 1)
    assert found["reason"] == "its outputs were NaN." and found["share"] == 0
    assert (found["step"], found["quarantined"]) == (
        -1,
        teacher.reader.rejected,
    )
    _swap(teacher, 11)
    found = teacher.status
    assert (found["health"], found["num_dropped"]) == ("good", 1)


def test_the_newest_quarantined_versions_are_listed(clock):
    teacher = _teacher(clock)
    teacher.reader.rejected = {step: f"reason {step}" for step in range(30)}
    found = teacher.status
    assert found["num_quarantined"] == 30
    assert list(found["quarantined"]) == list(range(20, 30))
    assert found["reason"] == "reason 29"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
