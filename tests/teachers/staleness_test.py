"""How stale a version may be, and what its age leaves it."""

import pytest
import tensorflow as tf

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


@pytest.mark.parametrize("share", [0.0, 1.0, 0.1, 1 / 3])
def test_a_verdict_travels_to_the_bit(share):
    verdict = staleness.Verdict(share, staleness.WORSE)
    assert staleness.decoded(*verdict.encoded()) == verdict


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
