"""Trainings in which no step had a teacher, and what is said of them."""

import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tests.cases import runs
from tfdistill.observe import run_log

_X, _Y = cases.data()


def _train(tmp_path, caplog, *, published=True, **kwargs):
    """Trains for two epochs; returns the warnings and the last line."""
    exchange = tfdistill.Exchange(tmp_path / "exchange")
    model = cases.codistill(cases.linear(0), cases.peers(exchange), **kwargs)
    cases.prepare(model, _X, _Y)
    if published:
        cases.publish(exchange, cases.linear(1))
        cases.load(model, 10)
    log = run_log.RunLogger(tmp_path / "log")
    callbacks = [cases.never(), log]
    cases.fit(model, _X, _Y, batch_size=4, epochs=2, callbacks=callbacks)
    told = [
        r.message for r in caplog.records if "never used a teacher" in r.message
    ]
    return told, runs.records(tmp_path / "log")[-1]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"published": False}, "group_1 is absent (no version in use)."),
        (
            {"distillation_weight": lambda step: -0.5},
            "`distillation_weight` was still -0.5 at step 8",
        ),
    ],
    ids=["no version", "negative"],
)
def test_a_training_without_a_teacher_says_so(
    tmp_path, caplog, options, reason
):
    (told,), last = _train(tmp_path, caplog, **options)
    assert reason in told
    (teacher,) = last["teachers"]
    is_due = "published" in options
    assert [teacher["num_due"], teacher["num_taught"]] == [8 * is_due, 0]
    assert last["event"] == "end" and last["untaught"].startswith(reason)


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({}, "the first version of group_1 (step 40) came at the end"),
        (
            {"num_quarantined": 2},
            "the first version of group_1 that wasn't refused (step 40) came "
            "at the end",
        ),
        ({"step": -1}, "group_1 gave no usable answer"),
        (
            {"health": "too_stale", "reason": "It is old."},
            "group_1 is too stale (It is old)",
        ),
        (
            {"health": "absent", "reason": "Worse.", "num_quarantined": 3},
            "group_1: 3 versions refused (Worse)",
        ),
    ],
)
def test_a_good_teacher_is_not_named_as_the_reason(status, said):
    teacher = runs.teacher(step=40)
    assert run_log._described({**teacher, **status}) == said


def test_steps_with_a_teacher_are_counted(tmp_path, caplog):
    told, last = _train(tmp_path, caplog)
    (teacher,) = last["teachers"]
    assert not told
    assert [teacher["num_due"], teacher["num_taught"]] == [8, 8]


def test_a_teacher_of_the_first_steps_was_one(tmp_path, caplog):
    def weight(step):
        return tf.where(step < 2, 1.0, 0.0)

    told, last = _train(tmp_path, caplog, distillation_weight=weight)
    assert not told and "untaught" not in last
