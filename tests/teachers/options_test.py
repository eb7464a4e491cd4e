"""How old a version may be, and what its age leaves it."""

import dataclasses
import inspect

import pytest
import tensorflow as tf

from tfdistill.teachers import options
from tfdistill.teachers import teacher_set

_AGES = [-3, 0, 9, 10, 11, 12, 14, 2**40]


@pytest.mark.parametrize(
    ("most", "ramp", "expected"),
    [
        (None, 0, [1] * 8),
        (10, 0, [1, 1, 1, 1, 0, 0, 0, 0]),
        (10, 4, [1, 1, 1, 1, 0.75, 0.5, 0, 0]),
        (0, 1, [1, 1, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_shares_by_steps(most, ramp, expected):
    found = options.TeacherOptions(
        max_staleness_steps=most, staleness_ramp_steps=ramp
    ).share(tf.constant(_AGES, tf.int64), 0)
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
    found = options.TeacherOptions(
        max_staleness_secs=most, staleness_ramp_secs=ramp
    ).share(0, round(secs * 1000))
    assert float(found) == expected


def test_the_lower_share_counts():
    both = options.TeacherOptions(
        max_staleness_steps=10,
        staleness_ramp_steps=4,
        max_staleness_secs=5,
        staleness_ramp_secs=2,
    )
    found = both.share(tf.constant([11, 11, 13]), tf.constant([0, 6000, 6000]))
    assert found.numpy().tolist() == [0.75, 0.5, 0.25]
    assert both.bounds == (
        "max_staleness_steps=10, staleness_ramp_steps=4, "
        "max_staleness_secs=5, staleness_ramp_secs=2"
    )
    assert options.TeacherOptions(max_staleness_steps=0).bounds == (
        "max_staleness_steps=0"
    )


@pytest.mark.parametrize(
    ("steps", "secs", "message"),
    [
        ((-1, 0), (None, 0), "max_staleness_steps.*-1"),
        ((None, 0), (float("nan"), 0), "max_staleness_secs.*nan"),
        ((1, -1), (None, 0), "staleness_ramp_steps.*-1"),
        ((None, 0), (1, float("inf")), "staleness_ramp_secs"),
        ((None, 3), (None, 0), "must come with a `max_staleness_steps`"),
        ((3, 0), (None, 3), "with a `max_staleness_secs`"),
    ],
)
def test_impossible_bounds_are_refused(steps, secs, message):
    with pytest.raises(ValueError, match=message):
        options.TeacherOptions(
            max_staleness_steps=steps[0],
            staleness_ramp_steps=steps[1],
            max_staleness_secs=secs[0],
            staleness_ramp_secs=secs[1],
        )


def test_the_options_are_the_arguments_of_a_teacher_set():
    arguments = set(inspect.signature(teacher_set.TeacherSet).parameters)
    fields = {
        field.name for field in dataclasses.fields(options.TeacherOptions)
    }
    assert fields == arguments - {"exchange"}


def test_other_schemas_need_one_to_compare_with():
    with pytest.raises(ValueError, match="must come with a `schema`"):
        options.TeacherOptions(allow_other_schemas=True)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
