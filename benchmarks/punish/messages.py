"""Bad messages to a worker's mailbox, as strangers and as an erring peer.

They hold values that no student survives: `benchmarks.soak_task` learns from
peers by the squares of differences, so that one wrong row makes its loss
infinite.
"""

import contextlib
import dataclasses
import itertools
import socket
import time
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import numpy as np

import tfdistill
from benchmarks.punish import run_view
from tfdistill.exchange import signing
from tfdistill.predictions import addresses
from tfdistill.predictions import mailbox
from tfdistill.predictions import message as message_lib
from tfdistill.system import run_files
from tfdistill.system import untrusted

# Its square is no float32.
_POISON = 1e30
# As the student of benchmarks.soak_task predicts them.
_SHAPE, _CLASSES = (64, 10), (10,)
# How far ahead of a group's last line its steps may be, while it is lied to.
_NUM_STEPS = 40
_STRANGER = signing.Signer(b"the key of nobody")
_NUM_HALF_OPEN = 200
_ANSWER_SECS = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """The mailbox of a worker, and a peer from which it takes messages.

    Attributes:
        name: Of both, for people.
        group: The worker's.
        address: Its host and port.
        incarnation: Of its mailbox.
        replica: One of its replicas.
        peer: A group that it learns from.
        peer_incarnation: Of that group's mailbox.
        signer: Has the run's key.
        step: The last one that the group has logged.
        is_logged: Whether the group logs what this worker refuses: its first
            one.
    """

    name: str
    group: int
    address: tuple[str, int]
    incarnation: bytes
    replica: int
    peer: int
    peer_incarnation: bytes
    signer: signing.Signer | None
    step: int
    is_logged: bool

    def shown(self, **changes: Any) -> bytes:
        """Returns what the peer opens a connection with, but for changes."""
        named: dict[str, Any] = {
            "group": self.group,
            "incarnation": self.incarnation,
            "signer": self.signer,
        } | changes
        return mailbox.pass_to(**named)

    def message(self, step: int, **changes: Any) -> message_lib.Message:
        """Returns the peer's message of a step, about nobody's batch."""
        found = message_lib.Message(
            self.peer,
            self.replica,
            step,
            self.peer_incarnation,
            b"nobody's",
            _CLASSES,
            (np.full(_SHAPE, _POISON, "float32"),),
        )
        return found._replace(**changes)

    def encoded(self, step: int, **changes: Any) -> bytes:
        """Returns the same, signed with the run's key."""
        return message_lib.encode(self.message(step, **changes), self.signer)


def find(view: run_view.RunView, group: int, draw: float) -> Target | None:
    """Returns the mailbox of one worker of a group; None if it has none."""
    exchange = tfdistill.Exchange(view.exchange, key=view.key)
    tasks = sorted(task.name for task in view.tasks(group))
    if not tasks:
        return None
    index = int(draw * len(tasks))
    worker = int(tasks[index].rpartition("_")[2])
    own = addresses.Address.find(exchange, group, worker)
    if own is None or not own.learns_from:
        return None
    peer = own.learns_from[0]
    other = addresses.Address.find(exchange, peer, worker)
    lines = untrusted.Tail(
        view.group_dir(group) / run_files.METRICS, last_bytes=65536
    ).read()
    steps = [s for line in lines if isinstance(s := line.get("step"), int)]
    if other is None or not steps:
        return None
    return Target(
        name=f"{tasks[index]}, in the name of group {peer}",
        group=group,
        address=(own.host, own.port),
        incarnation=own.incarnation,
        replica=own.replicas[0],
        peer=peer,
        peer_incarnation=other.incarnation,
        signer=exchange.signer,
        step=steps[-1],
        is_logged=worker == 0,
    )


def send(
    target: Target,
    messages: Iterable[bytes],
    shown: bytes,
    *,
    listen_secs: float = 0.1,
) -> bool:
    """Sends messages in one connection; whether it stays open so long."""
    with socket.create_connection(target.address, _ANSWER_SECS) as connection:
        try:
            connection.sendall(shown)
            for data in messages:
                connection.sendall(mailbox.framed(data))
            connection.settimeout(listen_secs)
            return bool(connection.recv(1))
        except TimeoutError:
            return True
        except OSError:
            return False


def forged(target: Target) -> str:
    """Sends what strangers would; returns who was let in, or nothing."""
    strangers: dict[str, tuple[bytes, dict[str, Any]]] = {
        "without a pass": (b"", {}),
        "with another key": (target.shown(signer=_STRANGER), {}),
        "for an earlier run": (target.shown(incarnation=bytes(16)), {}),
        "of no peer": (target.shown(), {"group": 10**6}),
        "of an earlier run": (target.shown(), {"incarnation": bytes(16)}),
    }
    admitted = [
        who
        for who, (shown, changes) in strangers.items()
        if send(
            target,
            [target.encoded(target.step, **changes)],
            shown,
            listen_secs=_ANSWER_SECS,
        )
    ]
    steps = range(target.step, target.step + _NUM_STEPS)
    for step in steps:
        for damaged in (
            b"GET / HTTP/1.1\r\n\r\n",
            message_lib.encode(target.message(step), _STRANGER),
            target.encoded(step)[:-40],
            target.encoded(step)[:-1] + b"\0",
        ):
            # A connection ends with the first of these.
            send(target, [damaged], target.shown())
    return ", ".join(admitted)


def _errors(target: Target) -> list[dict[str, Any]]:
    """Returns in what a peer's message of a step may be wrong."""
    rows = np.full(_SHAPE, _POISON, "float32")
    wider = np.full((_SHAPE[0], _SHAPE[1] + 1), _POISON, "float32")
    return [
        {},  # Another batch.
        {"arrays": (rows[1:],)},
        {"arrays": (np.full(_SHAPE, 2**30, "int32"),)},
        {"arrays": (wider,)},
        {"arrays": ()},
        {"arrays": (wider,), "classes": (_CLASSES[0] + 1,)},
        {"replica": target.replica + 1000},
        {"arrays": (np.full(_SHAPE, np.nan, "float32"),)},
    ]


def wrong(target: Target, *, secs: float) -> None:
    """Sends for a time what the peer must not say."""
    errors = _errors(target)
    near = range(target.step, target.step + _NUM_STEPS)
    far = [step + 10**6 for step in near]
    end = time.monotonic() + secs

    def messages() -> Iterator[bytes]:
        # Over and over: the peer's true ones would take their place.
        for changes in itertools.cycle(errors):
            for steps in (near, far):
                if time.monotonic() >= end:
                    return
                for step in steps:
                    yield target.encoded(step, **changes)
                time.sleep(0.02)

    send(target, messages(), target.shown())


def flood(target: Target, *, secs: float) -> None:
    """Sends as much as the worker takes, in good form and too large."""
    end = time.monotonic() + secs
    steps = range(target.step, target.step + _NUM_STEPS)
    data = [target.encoded(step) for step in steps] + [bytes(2**20)]

    def messages() -> Iterator[bytes]:
        for message in itertools.cycle(data):
            if time.monotonic() >= end:
                return
            yield message

    while time.monotonic() < end:
        send(target, messages(), target.shown())


def half_open(target: Target, *, secs: float) -> None:
    """Opens many connections that say nothing more for a time."""
    with contextlib.ExitStack() as stack:
        for number in range(_NUM_HALF_OPEN):
            connection = stack.enter_context(
                socket.create_connection(target.address, _ANSWER_SECS)
            )
            if number % 2:
                connection.sendall(b"\0")
        time.sleep(secs)
