"""Mailboxes of workers: what arrives, what is refused, and how long one waits.

No TensorFlow: two mailboxes in one process are two groups.
"""

import contextlib
import gc
import itertools
import logging
import socket
import threading

import numpy as np
import pytest

from tests.cases import threads
from tests.cases import waits
from tfdistill.exchange import publisher
from tfdistill.predictions import addresses
from tfdistill.predictions import guests
from tfdistill.predictions import mailbox
from tfdistill.predictions import message as message_lib
from tfdistill.system import processes

KEY = b"0123456789abcdef"
BATCH = b"12345678"
LONG_SECS = 30.0


class Worker:
    """The only worker of a group, with its mailbox."""

    def __init__(self, root, group=0, peers=(1,), *, key=KEY, **kwargs):
        self.group, self.peers = group, peers
        self.box = mailbox.Mailbox(
            publisher.Exchange(root, key=key),
            group=group,
            worker=0,
            peers=peers,
            **{
                "host": "127.0.0.1",
                "replicas": (0,),
                "wait_secs": LONG_SECS,
                **kwargs,
            },
        )

    def swap(self, step, *, peer=None, batch=BATCH, classes=3, array=None):
        if array is None:
            array = said(self.group, step)
        own = self.box.send(
            **predictions(
                self, step, batch=batch, classes=[classes], arrays=[array]
            )
        )
        asked = self.peers[0] if peer is None else peer
        return self.box.answers(own)[self.peers.index(asked)]


def said(group, step):
    return np.full([2, 3], 10 * group + step, "float32")


@pytest.fixture
def opened(tmp_path):
    """Makes workers that are open, and closes them."""
    with contextlib.ExitStack() as stack:

        def make(group, peers, **kwargs):
            worker = Worker(tmp_path, group, peers, **kwargs)
            worker.box.start()
            stack.callback(worker.box.stop)
            return worker

        yield make


@pytest.fixture
def two(opened):
    """Two groups that know each other."""
    workers = opened(0, (1,)), opened(1, (0,))
    meet(*workers)
    return workers


def predictions(worker, step, **changes):
    """What a worker's `send` takes."""
    return {
        "step": step,
        "replica": 0,
        "batch": BATCH,
        "classes": [3],
        "arrays": [said(worker.group, step)],
        **changes,
    }


def meet(*workers):
    waits.until(
        lambda: all(
            worker.box.peer(other.group).stream
            for worker in workers
            for other in workers
            if worker.group in other.peers
        )
    )


def both(one, other, step):
    return threads.together(lambda: one.swap(step), lambda: other.swap(step))


def arrived(worker, step, group=1):
    """Waits until a message of a step is in the box."""
    peer = worker.box.peer(group)
    waits.until(lambda: peer.newest.get(0, -1) >= step)


def put(worker, data, other, *, shown=None):
    """Sends bytes in a connection of their own, until it is closed."""
    shown = shown or guests.pass_to(
        worker.group, worker.box._incarnation, other.box._exchange.signer
    )
    with connected(worker) as connection:
        # It may be closed before all is sent.
        with contextlib.suppress(OSError):
            connection.sendall(shown + guests.framed(data))
            connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""


def connected(worker):
    address = "127.0.0.1", worker.box.port
    return socket.create_connection(address, LONG_SECS)


def message(worker, step=0, *, classes=(3,), arrays=None, **changes):
    """A message of a group, as it would send it."""
    arrays = (said(worker.group, step),) if arrays is None else arrays
    found = message_lib.Message(
        worker.group,
        0,
        step,
        worker.box._incarnation,
        BATCH,
        message_lib.layout(classes, arrays),
        b"".join(arrays),
    )
    return found._replace(**changes)


def sent(worker, **changes):
    return message_lib.encode(
        message(worker, **changes), worker.box._exchange.signer
    )


def without_waiting(worker, monkeypatch):
    """Has a worker's waits end at once, on a clock of their own; their list."""
    now, waits = [0.0], []

    def wait(secs):
        waits.append(secs)
        now[0] += secs

    monkeypatch.setattr(worker.box, "_clock", lambda: now[0])
    monkeypatch.setattr(worker.box._arrived, "wait", wait)
    return waits


def test_each_gets_what_the_other_said_in_the_same_step(two):
    one, other = two
    for step in range(5):
        answers = both(one, other, step)
        for answer, group in zip(answers, (1, 0), strict=True):
            np.testing.assert_array_equal(answer[0], said(group, step))
    peer = one.box.peer(1)
    assert (peer.num_answers, peer.num_missed) == (5, 0)
    assert peer.last_answer == 4
    assert peer.received_bytes == 5 * peer.last_bytes
    assert peer.last_bytes < 6 * 4 + 130


def test_the_first_message_waits_for_a_peer_that_starts_later(opened):
    one = opened(0, (1,))

    def later():
        waits.until(lambda: one.box.peer(1).recent)
        return opened(1, (0,)).swap(0)

    for answer in threads.together(lambda: one.swap(0), later):
        assert answer is not None


@pytest.mark.parametrize(
    ("peers", "replicas", "why"),
    [
        ((2,), (0,), "among its `peers`"),
        ((0,), (0, 1), "the same number of workers"),
    ],
)
def test_a_peer_that_cannot_answer_is_named(opened, peers, replicas, why):
    one = opened(0, (1,), wait_secs=0.0)
    opened(1, peers, replicas=replicas)
    assert one.swap(0) is None
    waits.until(lambda: why in one.box.peer(1).why)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("batch", {"batch": b"87654321"}),
        ("batch", {"arrays": (np.zeros([3, 3], "float32"),)}),
        ("shape", {"arrays": (np.zeros([2, 4], "float32"),)}),
        ("shape", {"classes": (4,)}),
        ("shape", {"arrays": ()}),
    ],
)
def test_a_wrong_answer_is_none_and_named_once(two, caplog, kind, wrong):
    one, other = two
    for step in range(2):
        put(one, sent(other, step=step, **wrong), other)
        arrived(one, step)
        assert one.swap(step) is None
    peer = one.box.peer(1)
    assert peer.num_refused == {kind: 2}
    assert set(peer.refused) == {0, 1}
    assert (peer.num_answers, peer.num_missed) == (0, 2)
    assert len([r for r in caplog.records if "isn't used:" in r.message]) == 1
    put(one, sent(other, step=2), other)
    assert one.swap(2) is not None


def test_classes_that_do_not_exist_are_refused(two):
    one, other = two
    drawn = np.array([[0, 3], [1, 2]], "int32")
    put(one, sent(other, arrays=(drawn,)), other)
    assert one.swap(0, array=np.zeros([2, 2], "int32")) is None
    assert "from 0 to 2; received from 0 to 3" in one.box.peer(1).refused[0]


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("forged", lambda other, root: b"GET / HTTP/1.1"),
        (
            "forged",
            lambda other, root: message_lib.encode(
                message(other), publisher.Exchange(root, key=b"x" * 16).signer
            ),
        ),
        ("size", lambda other, root: bytes(2**16)),
    ],
)
def test_a_message_of_a_stranger_is_refused(
    two, tmp_path, caplog, monkeypatch, kind, make
):
    monkeypatch.setattr(guests, "MAX_BYTES", 2**15)
    one, other = two
    both(one, other, 0)
    for _ in range(3):
        put(one, make(other, tmp_path), other)
    assert one.box.num_forged == {kind: 3}
    assert len([r for r in caplog.records if "isn't used:" in r.message]) == 1
    answers = both(one, other, 1)
    np.testing.assert_array_equal(answers[0][0], said(1, 1))


def test_a_message_in_the_name_of_no_peer_is_refused(two):
    one, other = two
    put(one, sent(other, group=7), other)
    assert one.box.num_forged == {"sender": 1}
    # One that is never asked for must not be kept.
    put(one, sent(other, replica=5), other)
    assert one.box.peer(1).num_refused == {"replica": 1}
    put(one, sent(other, incarnation=b"i" * 16), other)
    assert "restarted" in one.box.peer(1).why
    assert not one.box.peer(1).boxes


def test_a_connection_of_a_stranger_is_closed(two, tmp_path, monkeypatch):
    one, other = two
    stranger = Worker(tmp_path, 1, (0,), key=b"x" * 16)
    put(one, sent(other), stranger)
    # The pass to an earlier run of this mailbox.
    put(one, sent(other), other, shown=guests.pass_to(0, b"i" * 16, None))
    assert one.box.num_forged == {"forged": 2}
    # Who says nothing is not listened to for long.
    monkeypatch.setattr(guests, "MEET_SECS", 0.05)
    with connected(one) as connection:
        assert connection.recv(1) == b""
    assert not one.box.peer(1).boxes
    assert all(answer is not None for answer in both(one, other, 0))


def test_an_address_that_is_not_signed_is_none(opened, tmp_path):
    forger = Worker(tmp_path, 1, (0,), key=b"x" * 16)
    forger.box.start()
    try:
        one = opened(0, (1,), wait_secs=0.0)
        name = tmp_path / "group_1" / "mailbox-0.json"
        waits.until(name.exists)
        exchange = publisher.Exchange(tmp_path, key=KEY)
        assert addresses.Address.find(exchange, 1, 0) is None
        assert one.box.peer(1).address is None
    finally:
        forger.box.stop()


def test_a_dead_peer_is_waited_for_a_few_times(two, monkeypatch, caplog):
    one, other = two
    both(one, other, 0)
    other.box.stop()
    waits = without_waiting(one, monkeypatch)
    for step in range(1, 20):
        assert one.swap(step) is None
    assert waits == [LONG_SECS] * mailbox.MAX_SILENT
    assert one.box.peer(1).num_missed == 19
    assert "sends no predictions" in caplog.text


def test_a_peer_that_is_behind_is_waited_for_while_it_lives(two, monkeypatch):
    one, other = two
    waits = without_waiting(one, monkeypatch)
    for step in range(10, 20):
        put(one, sent(other, step=step - 10), other)
        assert one.swap(step) is None
    assert len(waits) == 10
    put(one, sent(other, step=20), other)
    assert one.swap(20) is not None


def test_a_peer_that_is_ahead_is_not_waited_for(two, monkeypatch):
    one, other = two
    waits = without_waiting(one, monkeypatch)
    for step in range(5, 5 + 3 * mailbox.MAX_KEPT):
        put(one, sent(other, step=step), other)
    assert one.swap(0) is None
    assert not waits
    # The newest steps are kept, and no more than these.
    assert len(one.box.peer(1).boxes[0]) == mailbox.MAX_KEPT
    last = 5 + 3 * mailbox.MAX_KEPT - 1
    assert one.swap(last) is not None
    assert not one.box.peer(1).boxes[0]


def test_steps_that_a_peer_has_never_reached_do_not_silence_it(two):
    one, other = two
    for step in range(10**6, 10**6 + mailbox.MAX_KEPT):
        put(one, sent(other, step=step), other)
    arrived(one, 10**6)
    assert one.swap(0) is None
    put(one, sent(other, step=1), other)
    assert one.swap(1) is not None


def test_what_a_peer_does_not_take_is_bounded(opened):
    one = opened(0, (1,), wait_secs=0.0)
    for step in range(3 * mailbox.MAX_KEPT):
        one.swap(step)
    peer = one.box.peer(1)
    waits.until(lambda: peer.num_unsent == 3 * mailbox.MAX_KEPT)
    assert len(peer.recent) == mailbox.MAX_KEPT


def test_machines_with_one_name_find_each_other(opened, monkeypatch):
    # All of 127.0.0.0/8 is here: each mailbox has an address that no other has.
    names = itertools.count()
    monkeypatch.setattr(processes, "machine", lambda: f"machine {next(names)}")
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    workers = []
    for group, address in enumerate(("127.0.0.2", "127.0.0.3")):
        listening = socket.create_server((address, 0))
        monkeypatch.setattr(processes, "listener", lambda _, it=listening: it)
        monkeypatch.setattr(processes, "own_addresses", lambda a=address: [a])
        workers.append(opened(group, (1 - group,), host=""))
        noted = workers[-1].box
        waits.until(lambda box=noted: box._is_listed)
    meet(*workers)
    answers = both(*workers, 0)
    assert all(answer is not None for answer in answers)


def test_a_peer_that_starts_again_teaches_again(two, opened):
    one, other = two
    both(one, other, 0)
    other.box.stop()
    again = opened(1, (0,))
    answers = both(one, again, 1)
    assert [a is not None for a in answers] == [True, True]


def test_half_a_connection_holds_up_nobody_and_the_oldest_go(two, monkeypatch):
    monkeypatch.setattr(guests, "MAX_WITHOUT_PASS", 10)
    one, other = two
    with contextlib.ExitStack() as stack:
        halves = [stack.enter_context(connected(one)) for _ in range(12)]
        for half in halves[:2]:
            assert half.recv(1) == b""
        # And a third, if the other worker has connected by now.
        assert one.box.num_forged["crowd"] in (2, 3)
        assert len(one.box._guests._without_pass) == 10
        halves[-1].sendall(b"\0")
        answers = both(one, other, 0)
        assert all(answer is not None for answer in answers)


def test_a_closed_mailbox_answers_at_once_and_opens_again(two):
    one, other = two
    waiting = threading.Thread(target=one.swap, args=[0])
    waiting.start()
    one.box.stop()
    waiting.join(LONG_SECS)
    assert not waiting.is_alive()
    assert one.swap(1) is None
    one.box.stop()
    one.box.start()
    answers = both(one, other, 2)
    assert all(answer is not None for answer in answers)


def test_whoever_comes_as_a_mailbox_closes_is_hung_up(opened, caplog):
    worker = opened(0, (1,))
    for _ in range(30):
        worker.box.start()
        guests = [connected(worker) for _ in range(3)]
        worker.box.stop()
        for guest in guests:
            with guest, contextlib.suppress(ConnectionResetError):
                assert guest.recv(1) == b""
        gc.collect()  # What is left open warns, and fails the test.
        assert not caplog.records


@pytest.fixture(autouse=True)
def _warnings(caplog):
    caplog.set_level(logging.WARNING)
