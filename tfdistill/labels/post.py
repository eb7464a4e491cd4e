"""The mailbox of one worker: predictions to peers, and theirs of the same step.

Each worker of a group sends to the worker of the same index in each group that
learns from it, in one gRPC stream: a call for each message costs seven times
the processor time. Addresses are notes in the exchange, signed with the run's
key as messages are, and so is the ticket without which no stream is opened: a
stranger cannot take the threads of the server. Nothing here knows of models,
and a step waits for a message at most `wait_secs`:

- for a peer that is alive and behind, at each step until it has caught up;
- for a peer of which nothing arrives, three times, and then no more until
  something does;
- for a peer that is ahead, never: it will not send this step again.
"""

import collections
import concurrent.futures
import dataclasses
import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import TypeGuard

import grpc
import numpy as np

from tfdistill.exchange import publisher
from tfdistill.labels import channels
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
_TICKET = "tfdistill-ticket"
_STOP_SECS = 5.0
# Of a stream, after which the next one is opened at once.
_LASTED_SECS = 5.0
# Messages that wait in a stream, of which a peer takes none.
_MAX_QUEUED = 32
# Between two looks at the notes of peers that do not answer.
_LOOK_SECS, _LONGEST_LOOK_SECS = 0.1, 2.0
_WRITE_SECS, _LONGEST_WRITE_SECS = 0.2, 30.0
_OPTIONS = [
    *channels.limits(MAX_BYTES),
    *channels.RECONNECTING,
    channels.OWN_PORT,
    # Peers are reached as TensorFlow reaches the workers of a group.
    ("grpc.enable_http_proxy", 0),
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
        num_unsent: Messages that were made while it took none; it may get the
            newest of them later.
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
        self.wants_messages = False
        # The newest messages to it, with which each stream begins.
        self.recent: collections.deque[bytes] = collections.deque()
        self.stream: _Stream | None = None
        self.pause = background.Backoff(first_secs=0.1, longest_secs=1.0)

    @property
    def is_silent(self) -> bool:
        """Whether steps no longer wait for it."""
        return self.num_silent >= MAX_SILENT

    @property
    def why(self) -> str:
        """Why it does not answer."""
        return self.trouble or f"its last answer was of step {self.last_answer}"


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
        self._dropped: list[_Stream] = []
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
        # A thread for each stream, and for one that follows a broken one.
        num_streams = 2 * len(self.learns_from) + 2
        self._pool = concurrent.futures.ThreadPoolExecutor(
            num_streams, thread_name_prefix="tfdistill-mailbox"
        )
        self._server = grpc.server(
            self._pool,
            handlers=[_Handler(self._is_admitted, self._take_all)],
            options=_OPTIONS,
            maximum_concurrent_rpcs=num_streams,
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
            self._poller.join(_STOP_SECS)
        if self._server is not None:
            self._server.stop(None).wait(_STOP_SECS)
            self._pool.shutdown(wait=False)
            self._server = None
        for peer in self._peers.values():
            self._forget(peer)
            peer.recent.clear()
        self._close_dropped()
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
                if peer.address is None or peer.wants_messages:
                    self._send(peer, data)
            return found

    # ---- to peers ----

    def _send(self, peer: Peer, data: bytes) -> None:
        peer.recent.append(data)
        if len(peer.recent) > MAX_KEPT * len(self._place.replicas):
            peer.recent.popleft()
        if peer.stream is None or peer.stream.is_full:
            peer.num_unsent += 1
            return
        peer.stream.put(data)
        peer.sent_bytes += len(data)

    def _connect(self, peer: Peer) -> None:
        """Opens a stream to a peer that wants messages, unless there is one."""
        with self._changed:
            address = peer.address
            if (
                not self._is_open
                or address is None
                or not peer.wants_messages
                or peer.stream is not None
                or not peer.pause.is_over
            ):
                return
            ticket = wire.ticket(
                self._exchange.signer,
                sender=(self._place.group, self._incarnation),
                receiver=(peer.group, address.incarnation),
            )
            stream = _Stream(address.target, ticket, self._clock())
            peer.stream = stream
            for data in peer.recent:
                stream.put(data)
        stream.call.add_done_callback(
            lambda call: self._ended(peer, stream, call.code())
        )

    def _ended(self, peer: Peer, stream: "_Stream", code: Any) -> None:
        with self._changed:
            if not self._is_open or peer.stream is not stream:
                return
            self._drop_stream(peer)
            if self._clock() - stream.opened > _LASTED_SECS:
                peer.pause.succeeded()
            peer.pause.failed()
            peer.trouble = f"it does not take messages: {code.name}"
            self._wake.set()

    # ---- from peers ----

    def _is_admitted(self, ticket: str | None) -> bool:
        """Whether somebody may open a stream; in the server's own thread."""
        group, incarnation = wire.holder(
            self._exchange.signer,
            ticket,
            receiver=(self._place.group, self._incarnation),
        )
        if group is None:
            self._refuse_unknown(
                "forged",
                "whoever opens a stream must have this run's key and this "
                "mailbox's address of now",
            )
            return False
        if group not in self.learns_from:
            self._refuse_unknown(
                "sender",
                "it must come from a group that this one learns from, "
                f"{list(self.learns_from)}; received one of group {group}",
            )
            return False
        with self._changed:
            peer = self._peers[group]
            address = peer.address
            if address is not None and incarnation == address.incarnation:
                return True
            # It has just started, and its note is not read yet; or it is of an
            # earlier run, and its note is that of another. It tries again.
            peer.trouble = "it has started again"
            self._wake.set()
            return False

    def _take_all(self, stream: Iterator[bytes], context: Any) -> bytes:
        """Takes the messages of a stream, in a thread of the server."""
        for data in stream:
            if not self._is_open or not self._take(data):
                context.abort(grpc.StatusCode.UNAVAILABLE, "later")
        return b""

    def _take(self, data: bytes) -> bool:
        """Takes a message; whether the stream may go on."""
        most = self._num_own_bytes
        if most is not None and len(data) > 2 * most + _SPARE_BYTES:
            self._refuse_unknown(
                "size",
                f"it must have about as many bytes as one's own, {most}; "
                f"received {len(data)}",
            )
            return True
        try:
            message = wire.decode(data, self._exchange.signer)
        except wire.MessageError as error:
            self._refuse_unknown("forged", str(error))
            return True
        with self._changed:
            peer = self._peers.get(message.group)
            address = peer.address if peer else None
            if (
                peer is None
                or address is None
                or message.incarnation != address.incarnation
            ):
                # Its note has changed since the stream was opened.
                return False
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
                return True
            self._keep(peer, message, len(data))
        return True

    def _keep(self, peer: Peer, message: wire.Message, num_bytes: int) -> None:
        box = peer.boxes.setdefault(message.replica, {})
        newest = peer.newest.get(message.replica, -1)
        if message.step < newest - MAX_KEPT:
            # It has never been there, or it would have started again.
            self._refuse(
                peer,
                "step",
                f"its steps must not go back; received it after step {newest}",
                step=message.step,
            )
            box.clear()
            newest = -1
        box[message.step] = message
        if len(box) > MAX_KEPT:
            del box[min(box)]
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
            self._close_dropped()
            for peer in self._peers.values():
                self._connect(peer)
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
                peer.wants_messages = True
            else:
                peer.recent.clear()
        return True

    def _drop_stream(self, peer: Peer) -> None:
        if peer.stream is not None:
            peer.stream.end()
            self._dropped.append(peer.stream)
            peer.stream = None

    def _close_dropped(self) -> None:
        """Closes streams, which waits for what their callbacks wait for.

        So it is neither for a callback of theirs nor for holders of the lock.
        """
        while self._dropped:
            self._dropped.pop().close()

    def _forget(self, peer: Peer) -> None:
        """Lets go of one incarnation of a peer; its figures stay."""
        self._drop_stream(peer)
        peer.address, peer.wants_messages = None, False
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

    def _refuse_unknown(self, kind: str, reason: str) -> None:
        self.num_forged[kind] += 1
        self._say(
            -1,
            kind,
            f"A message was refused: {reason}. More of its kind are counted.",
        )

    def _say(self, group: int, kind: str, text: str) -> None:
        """Warns of each kind of fault once."""
        if (group, kind) not in self._said:
            self._said.add((group, kind))
            _log.warning("%s", text)


class _Stream:
    """Messages to one peer, in their order."""

    def __init__(self, target: str, ticket: str, opened: float) -> None:
        self.opened = opened
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._channel = grpc.insecure_channel(target, _OPTIONS)
        self.call = self._channel.stream_unary(_METHOD).future(
            iter(self._queue.get, None), metadata=[(_TICKET, ticket)]
        )

    @property
    def is_full(self) -> bool:
        """Whether the peer takes nothing."""
        return self._queue.qsize() >= _MAX_QUEUED

    def put(self, data: bytes) -> None:
        """Sends a message, whenever the peer takes it."""
        self._queue.put(data)

    def end(self) -> None:
        """Lets go of the thread that sends."""
        self._queue.put(None)

    def close(self) -> None:
        """Closes the connection; what waits is lost."""
        self.call.cancel()
        self._channel.close()


class _Handler(grpc.GenericRpcHandler):
    """Takes streams of bytes from those who are admitted."""

    def __init__(
        self,
        is_admitted: Callable[[str | None], bool],
        take_all: Callable[[Iterator[bytes], Any], bytes],
    ) -> None:
        self._is_admitted = is_admitted
        self._method = grpc.stream_unary_rpc_method_handler(take_all)

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        """Returns what handles a call; None for one that is not admitted."""
        if details.method != _METHOD:
            return None
        ticket = dict(details.invocation_metadata).get(_TICKET)
        return self._method if self._is_admitted(ticket) else None


def _is_unsettled(peer: Peer) -> bool:
    return (
        peer.address is None
        or bool(peer.trouble)
        or (peer.wants_messages and peer.stream is None)
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
