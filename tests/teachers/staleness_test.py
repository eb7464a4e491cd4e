"""How stale a version may be, and what its age leaves it."""

import logging

import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tfdistill import schedules
from tfdistill.teachers import options
from tfdistill.teachers import staleness

_AGES = [-3, 0, 9, 10, 11, 12, 14, 2**40]


@pytest.mark.parametrize(
    ("most", "ramp", "expected"),
    [
        (None, 0, [1] * 8),
        ("auto", 0, [1] * 8),
        (10, 0, [1, 1, 1, 1, 0, 0, 0, 0]),
        (10, 4, [1, 1, 1, 1, 0.75, 0.5, 0, 0]),
        (0, 1, [1, 1, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_shares_by_steps(most, ramp, expected):
    given = options.TeacherOptions(
        max_staleness_steps=most, staleness_ramp_steps=ramp
    )
    found = staleness.share_by_steps(given, tf.constant(_AGES, tf.int64))
    assert found.numpy().tolist() == expected


@pytest.mark.parametrize(
    ("most", "ramp", "secs", "expected"),
    [
        (None, 0.0, 1e9, 1),
        (5.0, 0.0, 5.0, 1),
        (5.0, 0.0, 5.1, 0),
        (5.0, 2.0, 5.5, 0.75),
        (5.0, 2.0, 7.0, 0),
        (5.0, 2.0, 70.0, 0),
    ],
)
def test_shares_by_seconds(most, ramp, secs, expected):
    given = options.TeacherOptions(
        max_staleness_secs=most, staleness_ramp_secs=ramp
    )
    assert staleness.share_by_secs(given, secs) == expected


def test_a_version_fades_by_examples(tmp_path):
    exchange = tfdistill.Exchange(tmp_path)
    teachers = cases.teacher_set(
        exchange, max_staleness_examples=100, staleness_ramp_examples=100
    )
    model = cases.codistill(cases.linear(0), teachers)
    exporter = tfdistill.StudentExporter(
        tfdistill.Exchange(None), every_steps=1
    )
    cases.prepare(model, *cases.data(), callbacks=[exporter, cases.never()])
    for step, extras, expected in (
        (10, {"examples": 1000}, [(1, "good"), (0.5, "fading")]),
        # It does not say how many: as old as can be.
        (20, {}, [(0, "too_stale"), (0, "too_stale")]),
    ):
        cases.publish(exchange, cases.linear(1), step=step, extras=extras)
        cases.load(model, step)
        for examples, (share, health) in zip(
            (1100, 1150), expected, strict=True
        ):
            model.teachers.refresh(step=step, examples=examples)
            (status,) = model.teachers.status()
            assert (status["share"], status["health"]) == (share, health)


def test_a_bound_in_examples_needs_whoever_counts_them(tmp_path):
    exchange = tfdistill.Exchange(tmp_path)
    teachers = cases.teacher_set(exchange, max_staleness_examples=8)
    model = cases.codistill(cases.linear(0), teachers)
    loader = tfdistill.TeacherLoader(every_steps=1)
    with pytest.raises(ValueError, match="needs a tfdistill.StudentExporter"):
        cases.fit(model, *cases.data(), callbacks=[loader])
    exporter = tfdistill.StudentExporter(exchange, every_steps=1, group=0)
    cases.publish(exchange, cases.linear(1), step=1, extras={"examples": 4})
    cases.fit(model, *cases.data(), callbacks=[exporter, loader], epochs=2)
    (status,) = model.teachers.status()
    assert status["health"] in ("absent", "too_stale")


@pytest.mark.parametrize("share", [0.0, 1.0, 0.1, 1 / 3])
def test_a_verdict_travels_to_the_bit(share):
    verdict = staleness.Verdict(share, staleness.WORSE)
    assert staleness.decoded(*verdict.encoded()) == verdict


_BURN_IN = schedules.BurnIn(steps=20)


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (_BURN_IN, [True, True, False, False, False]),
        (
            schedules.LinearRamp(start_step=10, end_step=30),
            [True, False, False, False, False],
        ),
        (
            schedules.LinearRamp(start_step=20, end_step=30),
            [True, True, True, False, False],
        ),
        # No burn-in at all.
        (schedules.LinearRamp(start_step=0, end_step=30), [False] * 5),
        (schedules.CosineRamp(start_step=0, end_step=10**6), [False] * 5),
        (schedules.Constant(0.5), [False] * 5),
        # One that falls to 0 again.
        (
            schedules.LinearRamp(
                start_step=10, end_step=30, initial=1.0, weight=0.0
            ),
            [False] * 5,
        ),
    ],
)
def test_burn_in_is_the_time_before_a_schedule_begins(weight, expected):
    found = [staleness.in_burn_in(weight, s) for s in (0, 19, 20, 40, 10**6)]
    assert found == expected


def _following(exchange, weight, **kwargs):
    model = cases.codistill(
        cases.linear(0),
        cases.teacher_set(exchange, **kwargs),
        distillation_weight=weight,
    )
    cases.prepare(model, *cases.data())
    return model


def test_a_version_of_the_burn_in_has_no_weight(tmp_path, caplog):
    exchange = tfdistill.Exchange(tmp_path)
    model = _following(exchange, _BURN_IN)
    x, _ = cases.data()

    def weights():
        return cases.outputs_of_teachers(model, x, step=25)[1].max()

    with caplog.at_level(logging.INFO):
        for step in (10, 19):
            cases.publish(exchange, cases.linear(1), step=step)
            cases.load(model, step)
            assert weights() == 0
            model.teachers.refresh(step=25)
            (status,) = model.teachers.status()
            assert (status["health"], status["share"]) == ("burn_in", 0)
            assert f"version {step} is from the burn-in" in status["reason"]
            assert status["num_quarantined"] == 0
        found = [r for r in caplog.records if "burn-in" in r.getMessage()]
        assert [r.levelname for r in found] == ["INFO"]
    # What is beyond it teaches from the swap on.
    cases.publish(exchange, cases.linear(1), step=20)
    cases.load(model, 20)
    assert weights() == 1
    assert model.teachers.status()[0]["health"] == "good"


def test_others_are_not_affected(tmp_path):
    exchange = tfdistill.Exchange(tmp_path)
    path = cases.publish(exchange, cases.linear(1), step=10).path
    model = _following(None, _BURN_IN, peers=(), saved_models=[path])
    model.teachers.refresh(step=30)
    assert model.teachers.status()[0]["health"] == "good"
    # Nor is anybody without a burn-in.
    model = _following(exchange, schedules.LinearRamp(start_step=0, end_step=9))
    cases.load(model, 10)
    model.teachers.refresh(step=12)
    assert model.teachers.status()[0]["health"] == "good"


def test_the_own_past_begins_after_the_burn_in():
    model = _following(None, _BURN_IN, peers=(), include_past=True)
    for step in (10, 19):
        model.teachers.note_export(step, {})
        assert model.teachers.own_past.step == -1
    model.teachers.note_export(20, {})
    assert model.teachers.own_past.step == 20
