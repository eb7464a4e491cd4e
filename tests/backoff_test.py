import pytest

from tfdistill import backoff


def test_pauses_double_up_to_the_longest_and_a_success_ends_them():
    now = 0.0
    pause = backoff.Backoff(first_secs=1, longest_secs=5, clock=lambda: now)
    assert pause.is_over
    for secs in (1, 2, 4, 5, 5):
        pause.failed()
        now += secs - 0.01
        assert not pause.is_over
        now += 0.02
        assert pause.is_over
    pause.failed()
    pause.succeeded()
    assert pause.is_over
    pause.failed()
    now += 1.01
    assert pause.is_over


@pytest.mark.parametrize(("first", "longest"), [(0, 1), (2, 1), (-1, 1)])
def test_bad_pauses_are_named(first, longest):
    with pytest.raises(ValueError, match="`first_secs`"):
        backoff.Backoff(first_secs=first, longest_secs=longest)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
