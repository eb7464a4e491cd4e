"""One peer's versions: found, read, announced, taken, refused."""

import contextlib
import itertools
import logging
import random

import numpy as np
import pytest
import tensorflow as tf

from tests.cases import tiers
from tests.cases import waits
from tfdistill.exchange import deltas
from tfdistill.exchange import versions
from tfdistill.follow import agreement
from tfdistill.follow import follower
from tfdistill.follow import screen

_WAIT_SECS = 30.0


class _Manifest:
    graph_fingerprint = "f"

    def __init__(self, step, frame):
        self.step = step
        self.extras = {deltas.KEY_EVERY_FIELD: 4}
        if frame is not None:
            self.extras[deltas.FIELD] = {"frame": frame}


class _Exchange:
    """One peer's versions in memory, and what goes wrong with them."""

    def __init__(self, *steps, place="memory"):
        self.published = list(steps)
        # Of deltas, the key frame.
        self.frames = {}
        self._place = place
        if place == "memory":
            self.deltas = _Exchange(place="deltas")
        self.on_latest = lambda: None
        self.errors = {}

    def _version(self, step):
        manifest = _Manifest(step, self.frames.get(step))
        return versions.Version(1, step, f"{self._place}/{step}", manifest)

    def latest(self, group, *, newer_than=-1, wanted=lambda version: True):
        found = sorted(self.published, reverse=True)
        self.on_latest()
        for step in found:
            if step > newer_than and wanted(self._version(step)):
                return self._version(step)
        return None

    def open(self, group, step):
        self.fail("open", step)
        if step not in self.published:
            raise versions.VersionNotFoundError(f"no version {step}")
        return self._version(step)

    @contextlib.contextmanager
    def readable(self, version):
        self.fail("verify", version.step)
        yield version

    def fail(self, method, step):
        error = self.errors.get((method, step))
        if error is not None:
            raise error


def _reader(exchange, *, read=None, alone=True, **kwargs):
    return follower.Follower(
        exchange,
        1,
        read=read or (lambda version: version.step),
        alone=alone,
        **kwargs,
    )


def _round(reader):
    reader.look()
    reader.stage()


def test_what_a_resumed_training_has_taken_is_not_proposed_again():
    exchange = _Exchange(5)
    reader = _reader(exchange, alone=False)
    reader.look()  # The thread starts before the backup's state is known.
    reader.current = 5
    assert reader.newest == -1
    exchange.published.append(6)
    reader.look()
    assert reader.newest == 6


def test_another_group_is_followed_from_its_first_version():
    groups = {1: [40, 50], 2: [10]}
    exchange = _Exchange()
    exchange._version = lambda step: versions.Version(
        2 if step < 40 else 1, step, f"memory/{step}", _Manifest(step, None)
    )

    def read(version):
        if version.step == 50:
            # Meanwhile the group is given up.
            reader.follow(2)
            exchange.published = groups[2]
            reader.announce(50)
        return version.step

    reader = _reader(exchange, read=read)
    exchange.published = [40]
    _round(reader)
    reader.take_staged()
    reader.reject(45, "it is bad.")
    exchange.published = groups[1]
    _round(reader)
    # What was read of the one before is that one's.
    assert (reader.group, reader.current, reader.rejected) == (2, -1, {})
    reader.announce(-1)
    _round(reader)
    assert reader.take_staged().version.group == 2 and reader.current == 10


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("verify", versions.CorruptVersionError("is damaged")),
        ("read", screen.Refused("is damaged")),
    ],
)
def test_a_bad_version_fails_for_good(where, error, caplog):
    exchange = _Exchange(10)
    exchange.errors = {(where, 10): error}
    reader = _reader(exchange, read=lambda v: exchange.fail("read", v.step))
    _round(reader)
    if where == "verify":
        # The storage may be about to show the rest of it.
        assert reader.state == follower.PENDING
        _round(reader)
    assert reader.state == follower.FAILED
    with caplog.at_level(logging.WARNING):
        reader.reject(10)
        reader.reject(10)
    assert reader.rejected == {10: "is damaged"}
    assert caplog.text.count("is damaged") == 1
    _round(reader)
    assert reader.announced == -1


@pytest.mark.parametrize(
    "error",
    [
        versions.CorruptVersionError("weights are others"),
        versions.IncompleteVersionError("weights are missing"),
        versions.VersionNotFoundError("not there yet"),
    ],
)
def test_a_version_that_comes_into_sight_by_and_by_is_taken(error):
    exchange = _Exchange(10)
    exchange.errors = {("verify", 10): error}
    reader = _reader(exchange)
    _round(reader)
    exchange.errors = {}
    _round(reader)
    assert reader.take_staged().version.step == 10
    assert reader.rejected == {}


@pytest.mark.parametrize(
    "error",
    [
        OSError("stale handle"),
        versions.IncompleteVersionError("weights are missing"),
        versions.VersionNotFoundError("not there yet"),
    ],
)
def test_storage_that_is_away_costs_no_version(clock, caplog, error):
    """A peer that has finished publishes no other one."""
    exchange = _Exchange(10)
    exchange.errors = {("verify", 10): error}
    reader = _reader(exchange, clock=clock)
    for _ in range(3 * 10):
        _round(reader)
        assert reader.state == follower.PENDING
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) == 1
    # Pauses are bounded, and each has one try.
    exchange.errors = {}
    for _ in range(100):
        clock.now += 1.0
        _round(reader)
        if reader.state == follower.READY:
            break
    assert clock.now == 1.0 and reader.take_staged().version.step == 10
    assert reader.rejected == {}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError("bad block"), "OSError: bad block"),
        (versions.VersionNotFoundError("is lost"), "is lost"),
    ],
)
def test_a_version_that_storage_never_reads_gives_way_to_a_newer_one(
    clock, error, reason
):
    exchange = _Exchange(10)
    exchange.errors = {("verify", 10): error}
    reader = _reader(exchange, clock=clock)
    for _ in range(200):
        clock.now += 1.0
        _round(reader)
    assert reader.state == follower.PENDING
    exchange.published.append(11)
    clock.now += follower._LONGEST_PAUSE_SECS
    _round(reader)
    assert reader.state == follower.FAILED
    reader.reject(10)
    assert reader.rejected == {10: reason}
    _round(reader)
    assert reader.take_staged().version.step == 11


def test_a_version_that_cannot_be_read_is_given_up():
    exchange = _Exchange(10)
    exchange.errors = {("verify", 10): RuntimeError("no such op")}
    reader = _reader(exchange)
    states = []
    for _ in range(5):
        _round(reader)
        states.append(reader.state)
    assert states == [follower.PENDING] * 4 + [follower.FAILED]
    reader.reject(10)
    assert reader.rejected == {10: "RuntimeError: no such op"}
    # The next is tried as often.
    exchange.published.append(11)
    exchange.errors = {("verify", 11): RuntimeError("no such op")}
    for _ in range(4):
        _round(reader)
        assert reader.state == follower.PENDING
    exchange.errors = {}
    _round(reader)
    assert reader.state == follower.READY


def test_an_older_version_does_not_come_after_a_newer_one():
    """The newest version is taken while an older listing is on its way."""
    exchange = _Exchange(20)
    reader = _reader(exchange, alone=False)
    reader.announce(20)
    reader.stage()
    exchange.published = [10]
    exchange.on_latest = lambda: reader.announced >= 0 and reader.take_staged()
    reader.look()
    assert reader.current == 20
    assert reader.newest == -1


def test_the_same_reason_is_warned_of_once(caplog):
    reader = follower.Follower(None, 3, read=None, alone=True)
    with caplog.at_level(logging.WARNING):
        for step in (10, 20, 30):
            reader.reject(step, "its graph differs.")
        reader.reject(40, "a file is damaged.")
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "version 10 of group 3: its graph differs." in told[0]
    assert "version 40 of group 3: a file is damaged." in told[1]
    assert sorted(reader.rejected) == [10, 20, 30, 40]


def test_the_poller_outlives_errors_and_serves_all_peers(caplog):
    broken, sound = _Exchange(10), _Exchange(10)

    def fail():
        raise PermissionError("out of reach")

    broken.on_latest = fail
    readers = [_reader(broken), _reader(sound)]
    # What it does beside fails all the time.
    poller = follower.Following(readers, proposes=True, also=fail)
    with caplog.at_level(logging.ERROR):
        poller.start()
        waits.until(lambda: readers[1].state == follower.READY)
        broken.on_latest = lambda: None
        waits.until(lambda: readers[0].state == follower.READY)
        poller.stop()
    assert "out of reach" in caplog.text


class _Pending(Exception):
    """Raised in place of a collective, with this worker's part of it."""


class _Collective:
    """Records one worker's vector, then answers with the sum of all."""

    def __init__(self):
        self.answer = None

    def __call__(self, values):
        if self.answer is None:
            raise _Pending(values.copy())
        return self.answer


class _Group:
    """Workers whose background threads run whenever `rng` says so."""

    def __init__(self, rng, num_workers, *, with_deltas=False):
        self.rng, self._with_deltas = rng, with_deltas
        self.taken = []
        self.exchanges = [_Exchange() for _ in range(num_workers)]
        self.readers, self.agreements, self.collectives = [], [], []
        self.cannot_load = []
        for index, exchange in enumerate(self.exchanges):
            cannot_read = {s for s in range(40) if rng.random() < 0.05}
            cannot_load = {s for s in range(40) if rng.random() < 0.1}

            def read(version, cannot_read=cannot_read):
                if version.step in cannot_read:
                    raise screen.Refused("cannot read")
                return version.path

            # Each look at the clock is later than any pause of before.
            clock = itertools.count(
                0.0, 2 * follower._LONGEST_PAUSE_SECS
            ).__next__
            reader = _reader(
                exchange,
                read=read,
                alone=False,
                clock=clock,
                deltas_of="f" if with_deltas else "",
            )
            self.readers.append(reader)
            self.cannot_load.append(cannot_load)
            self.collectives.append(_Collective())
            made = agreement.Agreement(tf.distribute.get_strategy(), [reader])
            made._sum, made._is_chief = self.collectives[-1], index == 0
            made._num_workers = num_workers
            self.agreements.append(made)

    def background(self):
        """Some of what the workers' threads may do at any moment."""
        for _ in range(self.rng.randrange(4)):
            index = self.rng.randrange(len(self.readers))
            if index == 0 and self.rng.random() < 0.7:
                self.readers[0].look()
            self.readers[index].stage()

    def publish(self, step):
        frame = self.exchanges[0].published[-1:]
        is_delta = frame and self._with_deltas and self.rng.random() < 0.8
        for exchange in self.exchanges:
            if is_delta:
                exchange = exchange.deltas
                exchange.frames[step] = frame[0]
                if self.rng.random() < 0.1:
                    continue  # Lost, for this worker.
            exchange.published.append(step)
            while len(exchange.published) > 3:
                exchange.published.pop(0)
            if self.rng.random() < 0.15:
                error = self.rng.choice(
                    [versions.CorruptVersionError("torn"), OSError("stale")]
                )
                exchange.errors["verify", step] = error
            elif self.rng.random() < 0.3:
                exchange.errors.clear()

    def refresh(self):
        news = self._together(
            lambda index: self.agreements[index].exchange_news()
        )
        for reader, found in zip(self.readers, news, strict=True):
            if reader.announced < 0 and found.newest[0] >= 0:
                reader.announce(found.newest[0])
        self.background()
        # Every third version comes with a graph of its own.
        if news[0].ready and self.readers[0].staged.version.step % 3 == 0:
            news = self._together(self._confirm)
        else:
            news = [found.ready for found in news]
        for reader, ready in zip(self.readers, news, strict=True):
            if ready:
                self.taken.append(reader.take_staged().values)
            self.background()

    def _confirm(self, index):
        step = self.readers[index].staged.version.step
        cannot = step in self.cannot_load[index]
        return self.agreements[index].confirm({0: "no" if cannot else None})

    def _together(self, decide):
        vectors = []
        for index, collective in enumerate(self.collectives):
            collective.answer = None
            with pytest.raises(_Pending) as pending:
                decide(index)
            vectors.append(pending.value.args[0])
            self.background()
        results = []
        for index, collective in enumerate(self.collectives):
            collective.answer = np.sum(vectors, axis=0)
            results.append(decide(index))
            self.background()
        return results


@pytest.fixture
def no_warnings():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("no_warnings")
@pytest.mark.parametrize(
    ("num_workers", "with_deltas"),
    [tiers.deep(1, False), tiers.deep(3, False), (3, True)],
)
def test_workers_never_differ_and_never_go_back(num_workers, with_deltas):
    swaps = rejections = num_deltas = 0
    for seed in range(100):
        group = _Group(
            random.Random(seed), num_workers, with_deltas=with_deltas
        )
        before, step = -1, 0
        for _ in range(20):
            if group.rng.random() < 0.5:
                step += group.rng.randint(1, 2)
                group.publish(step)
            group.background()
            group.refresh()
            current = {reader.current for reader in group.readers}
            assert len(current) == 1, f"seed {seed}: {current}"
            rejected = [set(r.rejected) for r in group.readers]
            assert all(r == rejected[0] for r in rejected), f"seed {seed}"
            assert current.pop() >= before, f"seed {seed}"
            swaps += group.readers[0].current != before
            before = group.readers[0].current
            assert len({*group.taken[-num_workers:]}) <= 1
        rejections += len(group.readers[0].rejected)
        num_deltas += sum("deltas" in path for path in group.taken)
    # Otherwise nothing was tried.
    assert swaps > 160
    assert rejections > 60
    assert num_deltas > 100 * with_deltas - 1


@pytest.mark.usefixtures("no_warnings")
@pytest.mark.parametrize("num_workers", [tiers.deep(1), 3])
def test_after_any_trouble_a_good_version_arrives(num_workers):
    for seed in range(30):
        group = _Group(random.Random(seed), num_workers)
        for step in range(1, 12):
            group.publish(step)
            group.background()
            group.refresh()
        for exchange in group.exchanges:
            exchange.errors.clear()
            exchange.published.append(100)
        for _ in range(20):
            group.readers[0].look()
            for reader in group.readers:
                reader.stage()
            group.refresh()
        assert [r.current for r in group.readers] == [100] * num_workers
