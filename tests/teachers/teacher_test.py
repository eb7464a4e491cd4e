"""A teacher's record: its age, its health and what was put in place."""

import json
import logging
import types

import numpy as np
import pytest

from tfdistill.teachers import gates
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

    staged = None

    def take(self):
        self.current = self.next
        manifest = types.SimpleNamespace(extras={"every_steps": 10})
        version = types.SimpleNamespace(
            step=self.next, num_bytes=5, manifest=manifest
        )
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


def _swap(teacher, version, step=None):
    teacher.reader.next = version
    assert not teacher.swap(step)


def _refresh(teacher, step, beside=None):
    """What a group of one worker does without news; returns the status."""
    teacher.judge(step, beside)
    teacher.verdict = teacher.found
    teacher.note_step(step)
    return teacher.status


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
    assert teacher.status["age_secs"] == 15.0
    # The next was first seen 11 s ago.
    _swap(teacher, 8)
    assert teacher.status["age_secs"] == 11.0


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
    assert "has no weight" in caplog.messages[1]
    assert "max_staleness_steps=5" in teacher.status["reason"]
    assert teacher.status["too_stale"] is True
    _swap(teacher, 17)
    teacher.note_step(18)
    assert teacher.status["health"] == "good"
    assert len(caplog.records) == 2


def test_seconds_count_as_the_group_agreed(clock, caplog):
    """By the chief's clock: this task's own is for its log only."""
    teacher = _teacher(clock, max_staleness_secs=10, staleness_ramp_secs=10)
    _swap(teacher, 10)
    clock.now += 15
    teacher.note_step(11)
    assert teacher.status["health"] == "good"
    found = _refresh(teacher, 11)
    assert (found["share"], found["health"]) == (0.5, "fading")
    clock.now += 5
    assert _refresh(teacher, 12)["health"] == "too_stale"
    assert "it is 2 steps and 20 s old" in caplog.text


# ---- a peer that falls silent ----


def _shares(teacher, *steps):
    return [_refresh(teacher, step)["share"] for step in steps]


def test_a_silent_peer_fades_after_ten_of_its_intervals(clock, caplog):
    teacher = _teacher(clock)
    # Its manifest says that it publishes every 10 steps.
    _swap(teacher, 10, step=20)
    assert _shares(teacher, *range(25, 125, 5)) == [1.0] * 20
    assert not caplog.messages
    assert _shares(teacher, *range(125, 175, 5))[4::5] == [0.75, 0.5]
    assert teacher.status["health"] == "fading"
    assert _shares(teacher, *range(175, 225, 5))[-1] == 0
    assert teacher.status["health"] == "fading"
    assert _shares(teacher, 1000) == [0] and len(caplog.messages) == 2
    assert "and they came every 10 steps" in caplog.messages[0]
    assert "counts less and less until a newer" in caplog.messages[0]
    assert "has no weight until a newer" in caplog.messages[1]
    assert "publishes no more" in teacher.status["reason"]
    # It is back: at once all counts again.
    _swap(teacher, 30, step=1000)
    found = _refresh(teacher, 1010)
    assert (found["share"], found["health"]) == (1, "good")
    assert len(caplog.messages) == 2


def test_a_slow_peer_is_not_silent(clock):
    """Each version takes 100 of the student's steps, and says 10."""
    teacher = _teacher(clock)
    _swap(teacher, 10, step=100)
    _refresh(teacher, 150)
    _swap(teacher, 20, step=200)
    assert _shares(teacher, *range(250, 1250, 50)) == [1.0] * 20
    assert _shares(teacher, 1700) == [0.5]


def test_one_long_pause_does_not_make_a_peer_slow(clock):
    teacher = _teacher(clock)
    for version, step in ((10, 20), (20, 30), (30, 40), (40, 100)):
        _swap(teacher, version, step=step)
        _refresh(teacher, step + 5)
    # A quarter of 60, and three quarters of 10.
    assert teacher.silence.interval == 22.5
    assert _shares(teacher, *range(110, 326, 5)) == [1.0] * 44
    assert _shares(teacher, 330)[0] < 1


def test_few_refreshes_prove_nothing(clock):
    """Versions arrive at refreshes, and these are rarer than exports."""
    teacher = _teacher(clock)
    _swap(teacher, 10, step=1000)
    steps = range(2000, 12000, 1000)
    assert _shares(teacher, *steps) == [1.0] * 10
    assert _shares(teacher, 12000) == [pytest.approx(0.9)]


def test_no_bound_written_out_keeps_a_silent_peer(clock):
    teacher = _teacher(clock, max_staleness_steps=None)
    _swap(teacher, 10, step=20)
    assert _shares(teacher, *range(30, 1000, 10)) == [1.0] * 97


def test_worse_is_a_margin_with_hysteresis(clock):
    canary = gates.Canary(np.zeros([1, 4]), labels=[0], student_margin=0.2)
    teacher = _teacher(clock, canary=canary, max_staleness_steps=None)
    _swap(teacher, 10, step=10)
    beside = gates.Beside(student=gates.Answer(loss=0.3))
    found = []
    for number, loss in enumerate((0.45, 0.55, 0.45, 0.39, 0.45, 0.55)):
        teacher._answers = {10: gates.Answer(loss=loss)}
        # Far apart, so that no time is left to recover.
        step = 1000 * (1 + number)
        found.append(_refresh(teacher, step, beside)["health"])
    assert found == ["good", "worse", "worse", "good", "good", "worse"]
    # Nobody knows how good the student is: the last verdict holds.
    assert _refresh(teacher, 20)["health"] == "worse"


def test_a_good_teacher_may_be_worse_for_the_time_of_a_version(clock):
    canary = gates.Canary(np.zeros([1, 4]), labels=[0], student_margin=0.2)
    beside = gates.Beside(student=gates.Answer(loss=0.3))

    def healths(*losses, teacher, first=100):
        found = []
        for number, loss in enumerate(losses):
            step = first + 5 * number
            teacher._answers = {teacher.step: gates.Answer(loss=loss)}
            found.append(_refresh(teacher, step, beside)["health"])
        return found

    teacher = _teacher(clock, canary=canary)
    _swap(teacher, 80, step=80)
    _swap(teacher, 90, step=90)
    # Its versions come every ten steps: it has twenty.
    good, worse = ["good"], ["worse"]
    found = healths(0.4, 0.6, 0.6, 0.6, 0.4, 0.6, teacher=teacher)
    assert found == 6 * good
    found = healths(*5 * [0.6], 0.4, 0.39, teacher=teacher, first=130)
    assert found == 3 * good + 3 * worse + good
    # One that is worse by far has no time, nor has one that was never good.
    assert healths(1.4, teacher=teacher, first=165) == worse
    other = _teacher(clock, canary=canary)
    _swap(other, 80, step=80)
    _swap(other, 90, step=90)
    assert healths(0.6, teacher=other) == worse


def test_a_standing_comes_back_as_it_was(clock):
    """Bit for bit, as the chief and as the group had it."""
    before, after = _teacher(clock), _teacher(clock)
    _swap(before, 10, step=20)
    _shares(before, *range(30, 160, 10))
    kept = json.loads(json.dumps(before.standing()))
    _swap(after, 10)
    after.restore_standing(kept)
    assert after.share == before.share == 0.7
    steps = range(160, 240, 10)
    assert _shares(after, *steps) == _shares(before, *steps)


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
