"""Schedules of the distillation weight, by step."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdistill import schedules

EXAMPLES = [
    schedules.BurnIn(steps=7, weight=0.3),
    schedules.BurnIn(steps=3, ramp_steps=6, weight=0.7),
]
FAR = 2**40  # Beyond what float32 can count.


def values(schedule, steps):
    return [float(schedule(step)) for step in steps]


def test_burn_in_is_a_hard_switch():
    schedule = schedules.BurnIn(steps=1000, weight=0.5)
    assert values(schedule, [0, 999, 1000, FAR]) == [0.0, 0.0, 0.5, 0.5]
    assert values(schedules.BurnIn(steps=0), [0]) == [1.0]
    far = schedules.BurnIn(steps=FAR)
    assert values(far, [FAR - 1, FAR]) == [0.0, 1.0]


@pytest.mark.parametrize("start", [0, FAR])
def test_a_ramp_is_exact_at_both_ends_and_even(start):
    schedule = schedules.BurnIn(steps=start, ramp_steps=20, weight=0.3)
    got = values(schedule, range(start, start + 21))
    assert got[0] == 0.0 and got[-1] == np.float32(0.3)
    np.testing.assert_allclose(got, np.arange(21) * 0.3 / 20, rtol=1e-6)
    assert values(schedule, [start + 1000]) == [np.float32(0.3)]
    assert values(schedule, [max(0, start - 1)]) == [0.0]


@pytest.mark.parametrize("schedule", EXAMPLES, ids=repr)
def test_one_trace_serves_every_step(schedule):
    num_traces = 0

    @tf.function
    def weight(step):
        nonlocal num_traces
        num_traces += 1
        return schedule(step)

    step = tf.Variable(0, dtype=tf.int64)
    for number in range(12):
        step.assign(number)
        got = weight(step)
        assert got.dtype == tf.float32
        assert got.shape == ()
        assert float(got) == float(schedule(number))
    assert num_traces == 1


@pytest.mark.parametrize("schedule", EXAMPLES, ids=repr)
def test_serialisation_gives_the_same_schedule(schedule):
    copy = keras.saving.deserialize_keras_object(
        keras.saving.serialize_keras_object(schedule)
    )
    assert type(copy) is type(schedule)
    assert repr(copy) == repr(schedule)
    assert values(copy, range(12)) == values(schedule, range(12))


@pytest.mark.parametrize("identifier", [None, True, schedules.BurnIn])
def test_get_refuses_what_is_no_schedule(identifier):
    with pytest.raises(ValueError, match="must be a number, .* received"):
        schedules.get(identifier)


@pytest.mark.parametrize("name", ["steps", "ramp_steps"])
@pytest.mark.parametrize("steps", [-1, 1.5])
def test_steps_are_checked(name, steps):
    with pytest.raises(ValueError, match=f"`{name}` .* {steps}"):
        schedules.BurnIn(**{"steps": 0, name: steps})
