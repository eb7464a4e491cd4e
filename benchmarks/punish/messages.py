"""Bad messages to a worker's mailbox, as strangers and as an erring peer.

They hold values that no student survives: `benchmarks.soak_task` learns from
peers by the squares of differences, so that one wrong row makes its loss
infinite.
"""

import dataclasses
import itertools
import socket
import time
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
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
_POISONED = np.full(_SHAPE, _POISON, "float32")
# How far ahead of a group's last line its steps may be, while it is lied to.
_NUM_STEPS = 40
_STRANGER = signing.Signer(b"the key of nobody")
_ANSWER_SECS = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A group's first worker, and a peer from which it takes messages."""

    group: int
    own: addresses.Address
    peer: int
    other: addresses.Address
    signer: signing.Signer | None
    step: int

    @classmethod
    def find(cls, view: run_view.RunView, group: int) -> "Target | None":
        """Returns that of a group; None if it has no mailbox, or no peer."""
        exchange = tfdistill.Exchange(view.exchange, key=view.key)
        own = addresses.Address.find(exchange, group, 0)
        others = [g for g in range(view.num_groups) if g != group]
        if own is None or not others or not view.tasks(group):
            return None
        peer = others[0]
        other = addresses.Address.find(exchange, peer, 0)
        path = view.group_dir(group) / run_files.METRICS
        lines = untrusted.Tail(path, last_bytes=65536).read()
        steps = [s for line in lines if isinstance(s := line.get("step"), int)]
        if other is None or not steps:
            return None
        return cls(
            group=group,
            own=own,
            peer=peer,
            other=other,
            signer=exchange.signer,
            step=steps[-1],
        )

    @property
    def steps(self) -> range:
        """The steps that the worker is about to make."""
        return range(self.step, self.step + _NUM_STEPS)

    def shown(self, **changes: Any) -> bytes:
        """Returns what the peer opens a connection with, but for changes."""
        named: dict[str, Any] = {
            "group": self.group,
            "incarnation": self.own.incarnation,
            "signer": self.signer,
        }
        return mailbox.pass_to(**(named | changes))

    def encoded(
        self,
        step: int,
        *,
        signer: signing.Signer | None = None,
        arrays: Sequence[np.ndarray] = (_POISONED,),
        classes: Sequence[int] = _CLASSES,
        **changes: Any,
    ) -> bytes:
        """Returns the peer's message of a step, about nobody's batch."""
        found = message_lib.Message(
            self.peer,
            self.own.replicas[0],
            step,
            self.other.incarnation,
            b"nobody's",
            message_lib.layout(classes, arrays),
            b"".join(array.tobytes() for array in arrays),
        )
        return message_lib.encode(
            found._replace(**changes), signer or self.signer
        )

    def send(
        self, messages: Iterable[bytes], shown: bytes, *, listen_secs: float
    ) -> bool:
        """Sends all in one connection; whether it stays open so long."""
        address = self.own.host, self.own.port
        with socket.create_connection(address, _ANSWER_SECS) as connection:
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
        if target.send(
            [target.encoded(target.step, **changes)],
            shown,
            listen_secs=_ANSWER_SECS,
        )
    ]
    for step in target.steps:
        for damaged in (
            b"GET / HTTP/1.1\r\n\r\n",
            target.encoded(step, signer=_STRANGER),
            target.encoded(step)[:-40],
            target.encoded(step)[:-1] + b"\0",
        ):
            # A connection ends with the first of these.
            target.send([damaged], target.shown(), listen_secs=0.1)
    return ", ".join(admitted)


def wrong(target: Target, *, secs: float) -> None:
    """Sends for a time what the peer must not say."""
    wider = np.full((_SHAPE[0], _SHAPE[1] + 1), _POISON, "float32")
    errors: list[dict[str, Any]] = [
        {},  # Another batch.
        {"arrays": (_POISONED[1:],)},
        {"arrays": (np.full(_SHAPE, 2**30, "int32"),)},
        {"arrays": (wider,)},
        {"arrays": ()},
        {"arrays": (wider,), "classes": (_CLASSES[0] + 1,)},
        {"replica": target.own.replicas[0] + 1000},
        {"arrays": (np.full(_SHAPE, np.nan, "float32"),)},
    ]
    far = [step + 10**6 for step in target.steps]
    end = time.monotonic() + secs

    def messages() -> Iterator[bytes]:
        # Over and over: the peer's true ones would take their place.
        for changes in itertools.cycle(errors):
            for steps in (target.steps, far):
                if time.monotonic() >= end:
                    return
                for step in steps:
                    yield target.encoded(step, **changes)
                time.sleep(0.02)

    target.send(messages(), target.shown(), listen_secs=0.1)
