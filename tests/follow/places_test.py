"""A few places for many groups: who is looked at, and who takes a place."""

import contextlib
import math

import numpy as np
import pytest

from tfdistill.exchange import versions
from tfdistill.follow import follower
from tfdistill.follow import places

_GROUPS = [*range(1, 16)]


class _Manifest:
    graph_fingerprint = "f"


class _Exchange:
    """The newest version of each group, and how often one was looked for."""

    def __init__(self):
        self.newest, self.looks = {}, []
        self.unreachable = ()

    def latest(self, group, *, newer_than=-1, wanted=lambda version: True):
        self.looks.append(group)
        if group in self.unreachable:
            raise PermissionError("out of reach")
        step = self.newest.get(group, -1)
        found = step > newer_than and wanted(self.open(group, step))
        return self.open(group, step) if found else None

    def open(self, group, step):
        return versions.Version(group, step, f"memory/{step}", _Manifest())

    @contextlib.contextmanager
    def readable(self, version):
        yield version


class _Run:
    """Three places for fifteen groups, each of which publishes in turn."""

    def __init__(self):
        self.exchange = _Exchange()
        self.places = places.Places(self.exchange, _GROUPS)
        self.followers = [
            follower.Follower(self.exchange, group, read=str, alone=True)
            for group in _GROUPS[:3]
        ]
        for each in self.followers:
            self.places.add(each)
        self.step = 0

    def publish(self, *silent, ahead=()):
        self.step += 10
        for group in _GROUPS:
            if group not in silent:
                self.exchange.newest[group] = self.step + 100 * (group in ahead)

    def go_on(self, num_rounds, *silent, every=5, **kwargs):
        for number in range(num_rounds):
            if number % every == 0:
                self.publish(*silent, **kwargs)
            for each in self.followers:
                each.look()
                each.stage()
                if each.state == follower.READY:
                    before = each.group
                    each.take()
                    if each.group != before:
                        each.yields_after = math.inf

    @property
    def following(self):
        return self.places.state()["following"]


@pytest.fixture
def run():
    return _Run()


def test_content_places_look_at_their_own_groups_and_rarely_further(run):
    run.go_on(10)
    assert set(run.exchange.looks) == {1, 2, 3}
    for each in run.followers:
        each.yields_after = each.current + 10**6
    run.exchange.looks.clear()
    run.go_on(800)
    looks = np.bincount(run.exchange.looks, minlength=16)
    assert run.following == [1, 2, 3]
    # One look in eight rounds, at each of the others in turn.
    assert looks[4:].sum() == 100 and (looks[4:] >= 8).all()
    assert (looks[1:4] == 800).all()


def test_a_free_place_goes_to_a_group_that_publishes(run):
    run.go_on(10, 2, *range(4, 12))
    run.followers[1].yields_after = -1
    run.go_on(100, 2, *range(4, 12))
    assert run.following in ([1, group, 3] for group in range(12, 16))
    # The others have what they had.
    assert run.followers[0].current == run.step == run.followers[2].current


def test_a_group_that_published_long_ago_gets_no_place(run):
    run.publish()
    silent = [2, *range(4, 16)]
    run.go_on(10, *silent)
    run.followers[1].yields_after = -1
    run.go_on(300, *silent)
    assert run.following == [1, 2, 3]


def test_a_group_that_is_far_ahead_takes_a_place_once(run):
    run.go_on(10)
    changes = []
    for _ in range(200):
        for each in run.followers:
            each.yields_after = each.current + 50
        run.go_on(5, ahead=(9,))
        changes += [run.following] * (run.following not in changes)
    assert len(changes) == 2 and changes[0] == [1, 2, 3]
    assert 9 in changes[1]


def test_two_free_places_get_different_groups(run):
    run.go_on(10, 2, 3)
    for each in run.followers[1:]:
        each.yields_after = -1
    run.go_on(200, 2, 3)
    assert len(set(run.following)) == 3
    assert not {2, 3} & set(run.following)


def test_a_version_that_is_refused_gets_no_place(run):
    run.go_on(10)
    run.followers[0].yields_after = -1
    refused = versions.Version(7, 999, "memory/999", _Manifest())
    run.followers[0].propose(refused)
    run.followers[0].look()
    run.followers[0].reject(999, "it is bad.")
    assert run.followers[0].rejected == {}
    assert run.followers[0].announced == -1
    run.exchange.newest = {7: 999}
    for _ in range(100):
        run.followers[0].look()
    assert run.followers[0].groups == {1}


def test_what_cannot_be_looked_at_holds_nothing_up(run):
    run.exchange.unreachable = range(4, 15)
    run.go_on(10)
    run.followers[2].yields_after = -1
    run.go_on(200, 3)
    assert run.following == [1, 2, 15]
