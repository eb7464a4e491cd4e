"""What a TeacherSet may be asked for."""

import dataclasses
import inspect

import pytest

from tfdistill.teachers import options
from tfdistill.teachers import teacher_set


def test_bounds_are_said_by_their_names():
    both = options.TeacherOptions(
        max_staleness_steps=10,
        staleness_ramp_steps=4,
        max_staleness_secs=5,
        staleness_ramp_secs=2,
    )
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
        (("car", 0), (None, 0), "None or \"auto\"; received 'car'"),
        (("auto", 3), (None, 0), "must come with a `max_staleness_steps`"),
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
