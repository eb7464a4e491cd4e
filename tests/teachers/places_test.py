"""`Peers(at_most=...)`: which groups teach, and that nothing else changes."""

import concurrent.futures
import functools
import json
import threading
import time

import numpy as np
import pytest

import tfdistill
from tests.cases import codistillation as cases
from tfdistill.follow import places
from tfdistill.teachers import teacher

_X, _ = cases.data()

# The models here train without callbacks.
pytestmark = pytest.mark.filterwarnings("ignore:This is group")


@pytest.fixture(autouse=True)
def many_groups(monkeypatch):
    monkeypatch.setenv("TFDISTILL_NUM_GROUPS", "6")
    monkeypatch.setenv("TFDISTILL_GROUP", "4")
    monkeypatch.setattr(places, "_ROUNDS", 1)


def _model(exchange, at_most=2):
    return cases.following(exchange, peers=None, at_most=at_most)


# Each is traced once, however many versions a test publishes.
_student = functools.cache(cases.linear)


def _publish(exchange, step, *groups):
    for group in groups:
        cases.publish(exchange, _student(group), group=group, step=step)


def _names(model):
    return [each["name"] for each in model.teachers.status()]


def _lose_second(model, exchange):
    """Group 0, in the second place, gives NaN; group 2 publishes at last."""
    model.teachers._teachers[1].drop("its outputs are bad.")
    step = iter(range(21, 10**6))

    def has_changed():
        if _names(model)[1] == "group_0":
            _publish(exchange, next(step), 2)
        return model.teachers.status()[1]["step"] > 20

    cases.refresh_until(model, has_changed)


def test_each_group_prefers_others():
    first = set()
    for group in range(6):
        peers = tfdistill.teachers.Peers(tfdistill.Exchange(None), at_most=1)
        cluster = tfdistill.Cluster(group=group, num_groups=6)
        (member,) = peers.members(cluster)
        assert group not in member.places.groups
        first.add(member.name)
    assert len(first) == 6


def test_a_place_that_is_lost_goes_to_another_group(exchange):
    model = _model(exchange)
    _publish(exchange, 10, 5, 0)
    cases.load(model, 10, 10)
    assert _names(model) == ["group_5", "group_0"]
    generation = model.teachers.generation
    _lose_second(model, exchange)
    outputs, weights = cases.outputs_of_teachers(model, _X)
    np.testing.assert_allclose(outputs[1], cases.linear(2)(_X), rtol=1e-5)
    assert (weights == 1).all()
    assert _names(model) == ["group_5", "group_2"]
    # Nothing is traced again.
    assert model.teachers.generation == generation


class _Workers:
    """Two workers of a group, in threads that meet at each collective."""

    def __init__(self, exchange, monkeypatch):
        self.models = [_model(exchange) for _ in range(2)]
        self._meeting, self._said = threading.Barrier(2, timeout=60), {}
        self._threads = concurrent.futures.ThreadPoolExecutor(2)
        chief = self.models[0].teachers._student
        monkeypatch.setattr(
            teacher.Student, "is_chief", property(lambda one: one is chief)
        )
        for model in self.models:
            made = model.teachers.peers.agreement
            made._sum, made._num_workers = self._sum, 2
            made._is_chief = model is self.models[0]
            for peer in model.teachers:
                peer.follower._alone = False
            model.teachers.start()

    def _sum(self, values):
        self._said[threading.get_ident()] = values
        self._meeting.wait()
        total = np.sum([*self._said.values()], axis=0)
        self._meeting.wait()
        return total

    def stop(self):
        for model in self.models:
            model.teachers.stop()
        self._threads.shutdown()

    def refresh_until(self, done):
        """Refreshes both; what they know of teachers must not differ."""
        deadline = time.monotonic() + cases.WAIT_SECS
        while True:
            found = [m.teachers.status() for m in self.models]
            ours, theirs = (
                [(each["name"], each["step"]) for each in one] for one in found
            )
            assert ours == theirs
            if done(dict(ours)):
                return
            assert time.monotonic() < deadline, found
            [*self._threads.map(lambda m: m.teachers.refresh(), self.models)]
            time.sleep(0.002)


def test_workers_give_a_place_away_at_the_same_step(exchange, monkeypatch):
    workers = _Workers(exchange, monkeypatch)
    try:
        _publish(exchange, 10, 5, 0)
        workers.refresh_until({"group_5": 10, "group_0": 10}.__eq__)
        for model in workers.models:
            model.teachers._teachers[1].drop("its outputs are bad.")
        step = iter(range(21, 10**6))

        def is_taken(found):
            if "group_0" in found:
                _publish(exchange, next(step), 2)
            return found.get("group_2", -1) > 20

        workers.refresh_until(is_taken)
    finally:
        workers.stop()


def test_the_groups_in_places_come_back(exchange):
    before = _model(exchange)
    _publish(exchange, 10, 5, 0)
    cases.load(before, 10, 10)
    _lose_second(before, exchange)
    state = json.loads(json.dumps(before.teachers.state()))
    after = _model(exchange)
    after.teachers.restore(state)
    assert _names(after) == ["group_5", "group_2"]
    wanted, _ = cases.outputs_of_teachers(before, _X)
    found, _ = cases.outputs_of_teachers(after, _X)
    np.testing.assert_array_equal(found, wanted)
    # Another place begins as at a start.
    other = _model(exchange, at_most=3)
    other.teachers.restore(state)
    assert _names(other) == ["group_5", "group_2", "group_1"]


def test_no_group_has_two_places_after_a_resume_with_more_of_them(exchange):
    before = _model(exchange, at_most=1)
    (peer,) = before.teachers
    peer.follow(0)
    _publish(exchange, 10, 0)
    cases.load(before, 10)
    after = _model(exchange, at_most=3)
    after.teachers.restore(before.teachers.state())
    # Group 0 would be the second of three.
    assert _names(after) == ["group_0", "group_5", "group_1"]
    assert [each["step"] for each in after.teachers.status()] == [10, -1, -1]


def test_a_place_waits_for_its_group_but_not_for_ever(exchange):
    model, asked = _model(exchange), []
    for place in model.teachers:
        place.places.best = lambda *, newer_than: asked.append(newer_than) or -1
    for step in range(12):
        assert not asked
        model.teachers.refresh(step=step)
    assert asked == [-1, -1]


def test_a_group_is_behind_by_what_it_published_not_by_what_was_read(exchange):
    """A slow student reads less than its peers publish."""
    model, asked = _model(exchange), []
    _publish(exchange, 10, 5, 0)
    cases.load(model, 10, 10)
    first, second = model.teachers
    first.places.best = lambda *, newer_than: asked.append(newer_than) or -1
    _publish(exchange, 100, 5)
    for peer in (first, second):
        peer._silence.arrived(10, every_steps=2)
        peer.follower.look()
        peer.next_group()
    assert asked == [100 + 5 * 2, 10 + 5 * 2]


@pytest.mark.parametrize("at_most", [0, -1, 1.5, True, "2"])
def test_at_most_is_a_number_of_groups(at_most):
    with pytest.raises(ValueError, match="`at_most` must be a number"):
        tfdistill.teachers.Peers(at_most=at_most)
