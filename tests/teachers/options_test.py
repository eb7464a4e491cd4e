""""""

import pytest
import tensorflow as tf

from tfdistill.teachers import options as options_lib

_AGES = [-3, 0, 9, 10, 11, 12, 14, 2**40]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1] * 8),
        ({"max_steps": 10}, [1, 1, 1, 1, 0, 0, 0, 0]),
        (
            {"max_steps": 10, "ramp_steps": 4},
            [1, 1, 1, 1, 0.75, 0.5, 0, 0],
        ),
        ({"max_steps": 0, "ramp_steps": 1}, [1, 1, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_shares_by_steps_are_those_of_the_graph(options, expected):
    bounds = options_lib.Bounds(**options)
    found = bounds.share_by_steps(tf.constant(_AGES, tf.int64))
    assert found.dtype == tf.float32
    assert found.numpy().tolist() == expected
    assert [bounds.share(age, 0.0) for age in _AGES] == expected


@pytest.mark.parametrize(
    ("options", "age", "expected"),
    [
        ({}, 1e9, 1),
        ({"max_secs": 5.0}, 5.0, 1),
        ({"max_secs": 5.0}, 5.1, 0),
        ({"max_secs": 5.0, "ramp_secs": 2.0}, 5.5, 0.75),
        ({"max_secs": 5.0, "ramp_secs": 2.0}, 7.0, 0),
        ({"max_secs": 5.0, "ramp_secs": 2.0}, 70.0, 0),
    ],
)
def test_shares_by_seconds(options, age, expected):
    assert options_lib.Bounds(**options).share_by_secs(age) == expected


def test_the_lower_share_counts():
    bounds = options_lib.Bounds(
        max_steps=10, ramp_steps=4, max_secs=5, ramp_secs=2
    )
    assert bounds.share(11, 0.0) == 0.75
    assert bounds.share(11, 6.0) == 0.5
    assert bounds.share(13, 6.0) == 0.25
    assert str(bounds) == (
        "max_staleness_steps=10, staleness_ramp_steps=4, "
        "max_staleness_secs=5, staleness_ramp_secs=2"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_steps": -1}, "max_staleness_steps.*-1"),
        ({"max_secs": float("nan")}, "max_staleness_secs.*nan"),
        ({"max_steps": 1, "ramp_steps": -1}, "staleness_ramp_steps.*-1"),
        ({"max_secs": 1, "ramp_secs": float("inf")}, "staleness_ramp_secs"),
        ({"ramp_steps": 3}, "must come with a `max_staleness_steps`"),
        ({"max_steps": 3, "ramp_secs": 3}, "with a `max_staleness_secs`"),
    ],
)
def test_what_is_no_bound(options, message):
    with pytest.raises(ValueError, match=message):
        options_lib.Bounds(**options)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
