"""Which groups could take a place, and how often they are looked at."""

import numpy as np
import pytest

from tfdistill.follow import follower
from tfdistill.follow import places

_GROUPS = [*range(1, 16)]


class _Exchange:
    """The steps of each group's versions, and who was looked at."""

    def __init__(self):
        self.newest, self.looks = dict.fromkeys(_GROUPS, 0), []
        self.unreachable = ()

    def listed(self, group):
        self.looks.append(group)
        if group in self.unreachable:
            raise PermissionError("out of reach")
        return [0, self.newest[group]]


class _Run:
    """Three places for fifteen groups."""

    def __init__(self):
        self.exchange = _Exchange()
        self.places = places.Places(self.exchange, _GROUPS)
        self.places.followers += [
            follower.Follower(self.exchange, group, read=str, alone=True)
            for group in _GROUPS[:3]
        ]

    def go_on(self, num_turns, *silent):
        """Looks at each other group so often; the others publish in between."""
        for _ in range(num_turns):
            for group in _GROUPS:
                self.exchange.newest[group] += 10 * (group not in silent)
            for _ in range(8 * 12):
                self.places.look()


@pytest.fixture
def run():
    return _Run()


def test_others_are_looked_at_in_turn_and_rarely(run):
    run.go_on(10)
    looks = np.bincount(run.exchange.looks, minlength=16)
    # One look in eight rounds.
    assert (looks[4:] == 10).all() and not looks[:4].any()


def test_the_one_that_is_furthest_and_alive_comes_first_and_once(run):
    run.exchange.newest |= {9: 1000, 5: 500, 7: 5000}
    run.go_on(1)
    # Who was seen once may be gone.
    assert run.places.best(newer_than=-1) == -1
    run.go_on(2, 7, *range(10, 16))
    assert run.places.best(newer_than=1030) == -1
    found = [run.places.best(newer_than=100) for _ in range(3)]
    assert found == [9, 5, -1]


def test_who_is_followed_or_silent_or_out_of_reach_takes_no_place(run):
    run.go_on(3)
    run.places.followers[0].follow(4)
    run.exchange.unreachable = range(5, 14)
    run.go_on(1, 14)
    found = [run.places.best(newer_than=-1) for _ in range(3)]
    assert found == [15, 1, -1] or found == [15, -1, -1]
