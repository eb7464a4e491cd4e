"""The mailbox of one worker: predictions to peers, and theirs of the same step.

Each worker of a group sends to the worker of the same index in each group that
learns from it. Addresses are notes in the exchange, signed with the run's key
as messages are. Nothing here knows of models, and a step waits for a message at
most `wait_secs`:

- for a peer that is alive and behind, at each step until it has caught up;
- for a peer of which nothing arrives, three times, and then no more until
  something does;
- for a peer that is ahead, never: it will not send this step again.
"""

import collections
import concurrent.futures
import dataclasses
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any
from typing import TypeGuard

import grpc
import numpy as np

from tfdistill.exchange import publisher
from tfdistill.labels import wire
from tfdistill.system import background
from tfdistill.system import fresh_copies
from tfdistill.system import processes

# Steps of a sender that are kept, each way: how far it may be ahead.
MAX_KEPT = 16
# Waits in a row, without a sign of life, after which there are no more.
MAX_SILENT = 3
# A message must be smaller; gRPC refuses more before it is read.
MAX_BYTES = 64 * 2**20
_SPARE_BYTES = 64 * 1024
_MAX_LISTED = 10
_METHOD = "/tfdistill.Mailbox/Put"
_SEND_SECS = 5.0
# The answer to a message that is to be sent again.
_LATER = b"later"
_MAX_IN_FLIGHT = 4
# Between two looks at the notes of peers that do not answer.
_LOOK_SECS, _LONGEST_LOOK_SECS = 0.1, 2.0
_WRITE_SECS, _LONGEST_WRITE_SECS = 0.2, 30.0
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_BYTES),
    ("grpc.max_send_message_length", MAX_BYTES),
    # Peers are reached as TensorFlow reaches the workers of a group.
    ("grpc.enable_http_proxy", 0),
    ("grpc.so_reuseport", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A connection whose other end has gone without a word is found out.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Of several mailboxes in one process, each has its own connections.
    ("grpc.use_local_subchannel_pool", 1),
]
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Which worker of which group a mailbox is for.

    Attributes:
        group: Index of the group.
        worker: Index of the worker in it.
        replicas: Indices of its replicas among all of the group.
        host: Where peers on other machines reach it. Default: the name of
            this machine.
    """

    group: int
    worker: int
    replicas: tuple[int, ...]
    host: str = ""


@dataclasses.dataclass(frozen=True)
class _Address:
    """Where a peer's mailbox is, from its note."""

    target: str
    incarnation: bytes
    replicas: tuple[int, ...]
    learns_from: tuple[int, ...]


class Peer:
    """What a mailbox knows of the worker of the same index in another group.

    Attributes:
        num_answers, num_missed: Batches with and without its predictions.
        num_refused: By kind, messages that were refused.
        refused: Reasons by step, of the newest of those.
        num_unsent: Messages that it could not be given.
        last_answer: The step of its last answer; -1 without one.
        sent_bytes, received_bytes: Of all messages to and from it.
        last_bytes: Of the last message from it; None before.
    """

    def __init__(self, group: int) -> None:
        self.group = group
        self.address: _Address | None = None
        self.trouble = "its address is not known yet"
        self.num_answers = self.num_missed = self.num_unsent = 0
        self.num_refused: collections.Counter[str] = collections.Counter()
        self.refused: dict[int, str] = {}
        self.last_answer = -1
        self.sent_bytes = self.received_bytes = 0
        self.last_bytes: int | None = None
        self.num_silent = 0
        # By replica: messages by step, and the newest step that has arrived.
        self.boxes: dict[int, dict[int, wire.Message]] = {}
        self.newest: dict[int, int] = {}
        self.channel: grpc.Channel | None = None
        self.put: Any = None
        self.pending: collections.deque[bytes] = collections.deque()
        self.num_in_flight = 0
        self.pause = background.Backoff(first_secs=0.1, longest_secs=1.0)

    @property
    def is_silent(self) -> bool:
        """Whether steps no longer wait for it."""
        return self.num_silent >= MAX_SILENT

    @property
    def why(self) -> str:
        """Why it does not answer."""
        return self.trouble or f"its last answer was of step {self.last_answer}"

    @property
    def learns_here(self) -> bool:
        """Whether it is known and wants messages."""
        return self.put is not None


class Mailbox(fresh_copies.FreshCopies):
    """Sends one worker's predictions, and keeps what peers send."""

    def __init__(
        self,
        exchange: publisher.Exchange,
        place: Place,
        *,
        peers: Sequence[int],
        others: Sequence[int] = (),
        wait_secs: float = 0.05,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Opens nothing yet.

        Args:
            exchange: Where addresses are found, and whose key signs.
            place: Of this worker.
            peers: Groups that it learns from.
            others: Further groups, which may learn from it.
            wait_secs: Longest wait of a step for its peers, together.
            clock: Seconds that never go back.
        """
        self._exchange = exchange
        self._place = place
        self._wait_secs = wait_secs
        self._clock = clock
        self.learns_from = tuple(peers)
        everyone = dict.fromkeys((*peers, *others))
        self._peers = {g: Peer(g) for g in everyone if g != place.group}
        self._changed = threading.Condition()
        self._wake = threading.Event()
        self._is_open = False
        self._server: Any = None
        self._poller: threading.Thread | None = None
        self._incarnation = b""
        self._said: set[tuple[int, str]] = set()
        # By replica: the step under way, its message, and until when to wait.
        self._under_way: dict[int, tuple[wire.Message, float]] = {}
        self._num_own_bytes: int | None = None
        # Messages of which nobody knows who has sent them, by kind.
        self.num_forged: collections.Counter[str] = collections.Counter()

    @property
    def is_in_use(self) -> bool:
        """Whether it is open: a copy could not have its address."""
        return self._is_open

    @property
    def address(self) -> str | None:
        """Where this machine reaches it; None unless it is open."""
        return f"127.0.0.1:{self._port}" if self._is_open else None

    def peer(self, group: int) -> Peer:
        """Returns what is known of a peer."""
        return self._peers[group]

    # ---- open and closed ----

    def start(self) -> None:
        """Opens the mailbox, and looks for those of the peers."""
        if self._is_open or not self._exchange.enabled:
            return
        self._pool = concurrent.futures.ThreadPoolExecutor(
            2, thread_name_prefix="tfdistill-mailbox"
        )
        self._server = grpc.server(
            self._pool,
            handlers=[_Handler(self._take)],
            options=_OPTIONS,
            maximum_concurrent_rpcs=16 * max(1, len(self._peers)),
        )
        self._port = self._server.add_insecure_port("[::]:0")
        self._incarnation = secrets.token_bytes(16)
        self._server.start()
        self._wake.clear()
        self._is_open = True
        self._poller = threading.Thread(
            target=self._poll, name="tfdistill-peers", daemon=True
        )
        self._poller.start()

    def stop(self) -> None:
        """Closes the mailbox; a step that waits for it goes on at once."""
        if not self._is_open:
            return
        with self._changed:
            self._is_open = False
            self._changed.notify_all()
        self._wake.set()
        if self._poller is not None:
            self._poller.join(_SEND_SECS)
        if self._server is not None:
            self._server.stop(0.5).wait(1.0)
            self._pool.shutdown(wait=False)
            self._server = None
        for peer in self._peers.values():
            self._forget(peer)
        self._under_way.clear()

    # ---- a step ----

    def swap(
        self,
        group: int,
        *,
        step: int,
        replica: int,
        batch: bytes,
        classes: Sequence[int],
        arrays: Iterable[np.ndarray],
        num_rows: int,
    ) -> tuple[np.ndarray, ...] | None:
        """Sends a replica's predictions, and returns a peer's of the same step.

        Messages go to all peers at the first call for a step; the others wait
        no longer than that one. None without an answer.
        """
        own, end = self._posted(step, replica, batch, classes, arrays)
        peer = self._peers[group]
        with self._changed:
            while True:
                box = peer.boxes.setdefault(replica, {})
                received = box.pop(step, None)
                left = end - self._clock()
                if (
                    received is not None
                    or left <= 0
                    or not self._is_worth_waiting(peer, replica, step)
                ):
                    break
                self._changed.wait(left)
            for old in [s for s in box if s < step]:
                del box[old]
            if received is None and left <= 0 and not peer.is_silent:
                peer.num_silent += 1
                if peer.is_silent:
                    self._say(
                        group,
                        "silent",
                        f"Group {group} sends no predictions: {peer.why}. "
                        "Training goes on without them. It waits no more until "
                        "they come again; the status of the teachers counts.",
                    )
            if received is None:
                peer.num_missed += 1
                return None
            refusal = wire.refusal(received, own, num_rows=num_rows)
            if refusal is not None:
                peer.num_missed += 1
                self._refuse(peer, *refusal, step=step)
                return None
            peer.num_answers += 1
            peer.last_answer = max(step, peer.last_answer)
            if wire.has_faults(received):
                # Its other rows are good: the step leaves out those that are
                # not finite.
                self._refuse(
                    peer,
                    "finite",
                    "its predictions must be finite; those of some examples "
                    "are NaN or infinite, and do not count",
                    step=step,
                )
            return received.arrays

    def _is_worth_waiting(self, peer: Peer, replica: int, step: int) -> bool:
        return (
            self._is_open
            and not peer.is_silent
            and peer.newest.get(replica, -1) < step
        )

    def _posted(
        self,
        step: int,
        replica: int,
        batch: bytes,
        classes: Sequence[int],
        arrays: Iterable[np.ndarray],
    ) -> tuple[wire.Message, float]:
        """Sends the message of a step, once; it, and the end of the wait."""
        with self._changed:
            known = self._under_way.get(replica)
            if known is not None and known[0].step == step:
                return known
            own = wire.Message(
                self._place.group,
                replica,
                step,
                self._incarnation,
                batch,
                tuple(classes),
                tuple(arrays),
            )
            # What an answer is compared with; the values need not stay.
            bare = own._replace(arrays=tuple(a[:0].copy() for a in own.arrays))
            found = bare, self._clock() + self._wait_secs
            self._under_way[replica] = found
            if not self._is_open:
                return found
            data = wire.encode(own, self._exchange.signer)
            self._num_own_bytes = len(data)
            if len(data) >= MAX_BYTES:
                self._say(
                    self._place.group,
                    "size",
                    f"A message must have less than {MAX_BYTES} bytes; that of "
                    f"step {step} has {len(data)} and is not sent. Send less: "
                    "TeacherSet(form=Form(top_k=...)).",
                )
                return found
            for peer in self._peers.values():
                if peer.address is None or peer.learns_here:
                    if len(peer.pending) >= MAX_KEPT * len(
                        self._place.replicas
                    ):
                        peer.pending.popleft()
                        peer.num_unsent += 1
                    peer.pending.append(data)
        for peer in self._peers.values():
            self._send(peer)
        return found

    # ---- to peers ----

    def _send(self, peer: Peer) -> None:
        """Sends what is pending, as far as the peer takes it."""
        while True:
            with self._changed:
                if (
                    not self._is_open
                    or not peer.pending
                    or peer.put is None
                    or peer.num_in_flight >= _MAX_IN_FLIGHT
                    or not peer.pause.is_over
                ):
                    return
                data = peer.pending.popleft()
                peer.num_in_flight += 1
                put, address = peer.put, peer.address
            try:
                call = put.future(data, timeout=_SEND_SECS)
            except ValueError:  # The channel was closed meanwhile.
                return
            call.add_done_callback(
                lambda call, data=data, address=address: self._sent(
                    peer, data, address, call
                )
            )

    def _sent(self, peer: Peer, data: bytes, address: Any, call: Any) -> None:
        code = call.code()
        is_taken = code is grpc.StatusCode.OK and call.result() != _LATER
        with self._changed:
            if not self._is_open:
                return
            if peer.address is not address:
                # It has a new one; what the old one did not take goes there.
                if not is_taken and peer.put is not None:
                    peer.pending.appendleft(data)
                return
            peer.num_in_flight -= 1
            if is_taken:
                peer.pause.succeeded()
                peer.sent_bytes += len(data)
                peer.trouble = ""
            else:
                peer.pause.failed()
                peer.trouble = f"it does not take messages: {code.name}"
                if len(peer.pending) < MAX_KEPT:
                    peer.pending.appendleft(data)
                else:
                    peer.num_unsent += 1
                self._wake.set()
                return
        self._send(peer)

    # ---- from peers ----

    def _take(self, data: bytes, context: Any) -> bytes:
        """Takes one message, in a thread of the server."""
        most = self._num_own_bytes
        if most is not None and len(data) > 2 * most + _SPARE_BYTES:
            self._refuse_unknown(
                "size",
                f"it must have about as many bytes as one's own, {most}; "
                f"received {len(data)}",
                context,
            )
            return b""
        try:
            message = wire.decode(data, self._exchange.signer)
        except wire.MessageError as error:
            self._refuse_unknown("forged", str(error), context)
            return b""
        with self._changed:
            peer = self._peers.get(message.group)
            if peer is None or message.group not in self.learns_from:
                self._refuse_unknown(
                    "sender",
                    "it must come from a group that this one learns from, "
                    f"{list(self.learns_from)}; received one of group "
                    f"{message.group}",
                    context,
                )
                return b""
            address = peer.address
            if address is None or message.incarnation != address.incarnation:
                # It has just started, and its note is not read yet; or it is
                # of an earlier run, and its note is that of another.
                peer.trouble = "it has started again"
                self._wake.set()
                return _LATER
            if message.replica not in self._place.replicas:
                self._refuse(
                    peer,
                    "replica",
                    "it must be for a replica of this worker, "
                    f"{list(self._place.replicas)}; received replica "
                    f"{message.replica}. Use equally many workers and "
                    "replicas in all groups",
                    step=message.step,
                )
                return b""
            self._keep(peer, message, len(data))
        return b""

    def _keep(self, peer: Peer, message: wire.Message, num_bytes: int) -> None:
        box = peer.boxes.setdefault(message.replica, {})
        box[message.step] = message
        if len(box) > MAX_KEPT:
            del box[min(box)]
        newest = peer.newest.get(message.replica, -1)
        peer.newest[message.replica] = max(newest, message.step)
        peer.received_bytes += num_bytes
        peer.last_bytes = num_bytes
        peer.num_silent, peer.trouble = 0, ""
        self._changed.notify_all()

    # ---- addresses ----

    def _poll(self) -> None:
        """Leaves this worker's address, and finds those of the peers."""
        name = _note_name(self._place.worker)
        note = self._note()
        is_left = False
        write = background.Backoff(
            first_secs=_WRITE_SECS, longest_secs=_LONGEST_WRITE_SECS
        )
        look = background.Backoff(
            first_secs=_LOOK_SECS, longest_secs=_LONGEST_LOOK_SECS
        )
        while self._is_open:
            if not is_left and write.is_over:
                try:
                    self._exchange.notes(self._place.group).write(name, note)
                    is_left = True
                except OSError as error:
                    write.failed()
                    _log.warning("Could not leave an address: %s", error)
            unsettled = [p for p in self._peers.values() if _is_unsettled(p)]
            if unsettled and look.is_over:
                if any([self._look_for(peer, name) for peer in unsettled]):
                    look.succeeded()
                else:
                    look.failed()
            for peer in self._peers.values():
                self._send(peer)
            is_done = is_left and not unsettled
            self._wake.wait(_LONGEST_LOOK_SECS if is_done else _LOOK_SECS)
            if is_done:
                look.succeeded()
            self._wake.clear()

    def _note(self) -> dict[str, Any]:
        return {
            "host": self._place.host or socket.gethostname(),
            "port": self._port,
            "machine": processes.machine(),
            "incarnation": self._incarnation.hex(),
            "replicas": list(self._place.replicas),
            "learns_from": list(self.learns_from),
        }

    def _look_for(self, peer: Peer, name: str) -> bool:
        """Reads a peer's note; whether its address is another one."""
        try:
            note = self._exchange.notes(peer.group).read(name)
        except OSError as error:
            peer.trouble = f"its address cannot be read: {error}"
            return False
        found = _address_in(note)
        if found is None or found == peer.address:
            return False
        with self._changed:
            if not self._is_open:
                return False
            # The newest steps are news to it.
            pending = collections.deque(peer.pending)
            self._forget(peer)
            peer.address, peer.trouble = found, ""
            if found.replicas != self._place.replicas:
                peer.trouble = (
                    f"its worker {self._place.worker} has the replicas "
                    f"{list(found.replicas)}, and this one "
                    f"{list(self._place.replicas)}. Use equally many workers "
                    "and replicas in all groups"
                )
                self._say(peer.group, "replica", peer.trouble)
            elif self._place.group in found.learns_from:
                peer.channel = grpc.insecure_channel(found.target, _OPTIONS)
                peer.put = peer.channel.unary_unary(_METHOD)
                peer.pending = pending
        return True

    def _forget(self, peer: Peer) -> None:
        """Lets go of one incarnation of a peer; its figures stay."""
        if peer.channel is not None:
            peer.channel.close()
        peer.channel = peer.put = peer.address = None
        peer.num_in_flight = 0
        peer.pending.clear()
        peer.boxes.clear()
        peer.newest.clear()
        peer.pause.succeeded()
        peer.num_silent = 0

    # ---- what was refused ----

    def _refuse(self, peer: Peer, kind: str, reason: str, *, step: int) -> None:
        peer.num_refused[kind] += 1
        peer.refused[step] = f"{reason}."
        if len(peer.refused) > _MAX_LISTED:
            del peer.refused[min(peer.refused)]
        self._say(
            peer.group,
            kind,
            f"A message of group {peer.group}, step {step}, does not count: "
            f"{reason}. Training goes on; more of its kind are counted.",
        )

    def _refuse_unknown(self, kind: str, reason: str, context: Any) -> None:
        self.num_forged[kind] += 1
        self._say(
            -1,
            kind,
            f"A message from {context.peer()} was refused: {reason}. More of "
            "its kind are counted.",
        )

    def _say(self, group: int, kind: str, text: str) -> None:
        """Warns of each kind of fault once."""
        if (group, kind) not in self._said:
            self._said.add((group, kind))
            _log.warning("%s", text)


class _Handler(grpc.GenericRpcHandler):
    """Takes bytes, and answers with none."""

    def __init__(self, take: Callable[[bytes, Any], bytes]) -> None:
        self._method = grpc.unary_unary_rpc_method_handler(take)

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        """Returns what handles a call; None for one that is not known."""
        return self._method if details.method == _METHOD else None


def _is_unsettled(peer: Peer) -> bool:
    return (
        peer.address is None
        or bool(peer.trouble)
        or not peer.pause.is_over
        or peer.is_silent
    )


def _note_name(worker: int) -> str:
    return f"mailbox-{worker}"


def _address_in(note: dict[str, Any] | None) -> _Address | None:
    """Returns the address that a note holds; None for what is none."""
    note = note or {}
    host, port = note.get("host"), note.get("port")
    incarnation = note.get("incarnation")
    replicas, learns_from = note.get("replicas"), note.get("learns_from")
    if (
        not isinstance(host, str)
        or not 0 < len(host) < 256
        or type(port) is not int
        or not 0 < port < 2**16
        or not isinstance(incarnation, str)
        or len(incarnation) != 32
        or not set(incarnation) <= set("0123456789abcdef")
        or not _is_indices(replicas)
        or not _is_indices(learns_from)
    ):
        return None
    machine = note.get("machine")
    if machine and machine == processes.machine():
        host = "127.0.0.1"
    return _Address(
        f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        bytes.fromhex(incarnation),
        tuple(replicas),
        tuple(learns_from),
    )


def _is_indices(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(i) is int for i in value)
