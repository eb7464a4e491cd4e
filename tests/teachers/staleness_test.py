"""What the version of a peer still counts."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.cases import codistillation as cases
from tfdistill import callbacks as callbacks_lib
from tfdistill import schedules
from tfdistill import teachers as kinds
from tfdistill.teachers import staleness
from tfdistill.teachers import teacher as teacher_lib


def _shares(model, *steps):
    found = []
    for step in steps:
        model.teachers.refresh(step=step)
        found.append(model.teachers.status()[0]["share"])
    return found


def _version(model, exchange, version, *, step):
    """Puts a version in place at a step of the student."""
    extras = {"every_steps": 10}
    cases.publish(exchange, cases.linear(1), step=version, extras=extras)
    (peer,) = model.teachers
    peer.follower.look()
    peer.follower.stage()
    assert model.teachers.refresh(step=step) == ["group_1"]


def test_a_silent_peer_fades_after_ten_of_its_intervals(exchange, caplog):
    model = cases.following(exchange)
    # Its manifest says that it publishes every 10 steps.
    _version(model, exchange, 10, step=20)
    assert _shares(model, *range(25, 125, 5)) == [1.0] * 20
    assert not caplog.messages
    assert _shares(model, *range(125, 175, 5))[4::5] == [0.75, 0.5]
    # So much each row counts in a step.
    soft = cases.ask(model, cases.data()[0], 170)
    np.testing.assert_allclose(soft.share_of_rows, [0.5] * 16)
    assert _shares(model, *range(175, 225, 5))[-1] == 0
    assert model.teachers.status()[0]["health"] == "fading"
    assert _shares(model, 1000) == [0] and len(caplog.messages) == 2
    assert "and they used to come every 10 steps" in caplog.messages[0]
    assert "loses weight until a newer" in caplog.messages[0]
    assert "has no weight until a newer" in caplog.messages[1]
    # It is back: at once all counts again.
    _version(model, exchange, 30, step=1000)
    assert _shares(model, 1010) == [1]
    assert model.teachers.status()[0]["health"] == "good"


def _silence(*arrivals):
    found = staleness.Silence()
    for step in arrivals:
        found.arrived(step, every_steps=10)
        found.refreshed(step + 5)
    return found


def _silent(silence, *steps):
    found = []
    for step in steps:
        silence.refreshed(step)
        found.append(silence.share(step, version=0))
    return found


def test_a_slow_peer_is_not_silent():
    """Each version takes 100 of the student's steps, and says 10."""
    silence = _silence(100, 200)
    assert _silent(silence, *range(250, 1250, 50)) == [1.0] * 20
    assert _silent(silence, 1700) == [0.5]


def test_versions_that_were_held_up_do_not_make_a_peer_silent():
    """Two arrive at once, and those of a slow peer come as slowly as before."""
    silence = _silence(90, 91)
    assert _silent(silence, *range(95, 195, 5)) == [1.0] * 20


def test_a_version_that_is_ahead_of_the_student_does_not_fade(exchange):
    """Its group may have finished, which is no reason to learn less from it."""
    model = cases.following(exchange)
    _version(model, exchange, 300, step=20)
    assert _shares(model, *range(25, 405, 5)) == [1.0] * 76
    assert _shares(model, *range(405, 455, 5))[-1] == 0.5


def test_few_refreshes_prove_nothing():
    """Versions arrive at refreshes, and these are rarer than exports."""
    silence = staleness.Silence()
    silence.arrived(1000, every_steps=10)
    assert _silent(silence, *range(2000, 12000, 1000)) == [1.0] * 10
    assert _silent(silence, 12000) == [pytest.approx(0.9)]


def test_a_bound_in_steps_is_exact_and_none_keeps_a_silent_peer(exchange):
    model = cases.following(exchange, max_staleness_steps=30)
    _version(model, exchange, 10, step=20)
    # Also where refreshes are rarer than steps.
    for step, weight in ((40, 1), (41, 0)):
        found = cases.ask(model, cases.data()[0], step).weights
        np.testing.assert_array_equal(found, [[weight] * 16])
    assert _shares(model, 40, 41) == [1, 0]
    assert model.teachers.status()[0]["health"] == "too_stale"
    model = cases.following(exchange, max_staleness_steps=None)
    cases.load(model, 10)
    assert _shares(model, *range(30, 1000, 10)) == [1.0] * 97


_BURN_IN = schedules.BurnIn(steps=20)


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (_BURN_IN, [True, True, False, False, False]),
        (
            schedules.BurnIn(steps=20, ramp_steps=10),
            [True, True, True, False, False],
        ),
        # No burn-in at all.
        (schedules.BurnIn(steps=0, ramp_steps=30), [False] * 5),
        # One that falls to 0 again.
        (keras.optimizers.schedules.PolynomialDecay(1.0, 30, 0.0), [False] * 5),
    ],
)
def test_burn_in_is_the_time_before_a_schedule_begins(weight, expected):
    student = teacher_lib.Student(None, None, weight=weight)
    found = [student.in_burn_in(step) for step in (0, 19, 20, 40, 10**6)]
    assert found == expected


def _following(teachers, weight):
    model = cases.codistill(
        cases.linear(0), teachers, distillation_weight=weight
    )
    cases.prepare(model, *cases.data())
    return model


def test_a_version_of_the_burn_in_is_not_taken(exchange):
    model = _following(cases.peers(exchange), _BURN_IN)
    (peer,) = model.teachers
    for step in (10, 19):
        cases.publish(exchange, cases.linear(1), step=step)
        peer.follower.look()
        assert peer.follower.announced == -1
    (status,) = model.teachers.status()
    assert (status["health"], status["num_quarantined"]) == ("absent", 0)
    # Nor, though the student's own is over, is one of its group's.
    extras = {"burn_in": True}
    cases.publish(exchange, cases.linear(2), step=30, extras=extras)
    peer.follower.look()
    assert peer.follower.announced == -1
    # What is beyond it teaches from the swap on.
    cases.publish(exchange, cases.linear(1), step=20)
    cases.load(model, 20)
    assert model.teachers.status()[0]["health"] == "good"


def test_the_own_past_begins_after_the_burn_in():
    model = _following(kinds.OwnPast(), _BURN_IN)
    for step, held in ((10, -1), (19, -1), (20, 20)):
        model.teachers.note_export(step, {})
        assert model.teachers.status()[0]["step"] == held


def test_a_version_beyond_its_bound_has_no_weight_at_the_very_step(
    exchange, caplog
):
    x, y = cases.data()
    num_traced = []

    def weight(step):
        if not tf.executing_eagerly():
            num_traced.append(step)
        return tf.constant(0.5)

    model = cases.codistill(
        cases.linear(0),
        cases.peers(exchange, max_staleness_steps=3),
        distillation_weight=weight,
    )
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(16).repeat()
    steps = {"steps_per_epoch": 1}
    cases.prepare(model, data, **steps)
    # Rarer than the steps: the step itself sees the age.
    callbacks = [callbacks_lib.TeacherLoader(every_steps=5)]
    cases.publish(exchange, cases.linear(1), step=0)
    cases.load(model, 0)
    with caplog.at_level(logging.WARNING):
        logs = cases.fit(model, data, epochs=6, callbacks=callbacks, **steps)
    assert logs["distillation_weight"] == [0.5] * 4 + [0] * 2
    expected = np.add(
        logs["task_loss"],
        np.multiply(logs["distillation_weight"], logs["distillation_loss"]),
    )
    np.testing.assert_allclose(logs["loss"], expected, rtol=1e-5)
    (status,) = model.teachers.status()
    found = [status[key] for key in ("health", "share", "age_steps")]
    assert found == ["too_stale", 0, 5]
    assert caplog.text.count("max_staleness_steps=3") == 1
    # The peer is back: at once all counts again, and nothing was retraced.
    cases.publish(exchange, cases.linear(2), step=6)
    cases.load(model, 6)
    logs = cases.fit(model, data, epochs=2, callbacks=callbacks, **steps)
    np.testing.assert_allclose(logs["distillation_weight"], [0.5, 0.5])
    assert model.teachers.status()[0]["health"] == "good"
    assert len(num_traced) == 1
