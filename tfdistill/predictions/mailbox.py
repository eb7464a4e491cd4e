"""The mailbox of one worker: predictions to peers, and theirs of the same step.

Each worker of a group sends to the worker of the same index in each group that
learns from it, in one connection that stays. A thread with an event loop moves
all bytes. Addresses are notes in the exchange, signed with the run's key as
messages are, and so is the pass with which a connection begins: a stranger gets
no further. Nothing here knows of models, and a step waits for its messages at
most `wait_secs`:

- for a peer that is alive and behind, at each step until it has caught up;
- for a peer of which nothing arrives, three times, and then no more until
  something does;
- for a peer that is ahead, never: it will not send this step again.
"""

import asyncio
import collections
import dataclasses
import hmac
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence

import numpy as np

from tfdistill.exchange import publisher
from tfdistill.exchange import signing
from tfdistill.predictions import addresses
from tfdistill.predictions import message as message_lib
from tfdistill.system import background

# Steps of a sender that are kept, each way: how far it may be ahead.
MAX_KEPT = 16
# Waits in a row, without a sign of life, after which there are no more.
MAX_SILENT = 3
# A message must be smaller; more is refused before it is read.
MAX_BYTES = 64 * 2**20
_SPARE_BYTES = 64 * 1024
_MAX_LISTED = 10
_STOP_SECS = 5.0
# In which a connection is made, and begins with a pass.
_MEET_SECS = 5.0
# Of a connection, after which the next one is opened at once.
_LASTED_SECS = 5.0
# Messages that wait in a connection, of which a peer takes none.
_MAX_QUEUED = 32
# Between two looks at the notes of peers that do not answer.
_LOOK_SECS, _LONGEST_LOOK_SECS = 0.1, 2.0
# A connection whose other end has gone without a word is found out. Not every
# system has all of these.
_KEEPALIVE = {
    "TCP_KEEPIDLE": 10,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 1,
    "TCP_USER_TIMEOUT": 15_000,
}
# Before each message.
_LENGTH = struct.Struct("<I")
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


class Peer:
    """What a mailbox knows of the worker of the same index in another group.

    Attributes:
        num_answers, num_missed: Batches with and without its predictions.
        num_refused: By kind, messages that were refused.
        refused: Reasons by step, of the newest of those.
        num_unsent: Messages that were made while it took none; it may get the
            newest of them later.
        last_asked, last_answer: The last step that has asked it, and the last
            one that it has answered; -1 without one.
        sent_bytes, received_bytes: Of all messages to and from it.
        last_bytes: Of the last message from it; None before.
    """

    def __init__(self, group: int, lock: threading.Lock) -> None:
        self.group = group
        self.num_answers = self.num_missed = self.num_unsent = 0
        self.num_refused: collections.Counter[str] = collections.Counter()
        self.refused: dict[int, str] = {}
        self.last_asked = self.last_answer = -1
        self.sent_bytes = self.received_bytes = 0
        self.last_bytes: int | None = None
        # What steps and the event loop share, under the mailbox's lock. By
        # replica: messages by step, and the newest step that has arrived.
        self.arrived = threading.Condition(lock)
        self.boxes: dict[int, dict[int, message_lib.Message]] = {}
        self.newest: dict[int, int] = {}
        self.num_silent = 0
        # Only the event loop changes what follows while it runs.
        self.address: addresses.Address | None = None
        self.trouble = "its address is not known yet"
        # The newest messages to it, with which each connection begins.
        self.recent: collections.deque[bytes] = collections.deque()
        # Sends for as long as the peer wants messages.
        self.sender: asyncio.Task[None] | None = None
        self.stream: asyncio.WriteTransport | None = None

    @property
    def is_silent(self) -> bool:
        """Whether steps no longer wait for it."""
        return self.num_silent >= MAX_SILENT

    @property
    def why(self) -> str:
        """Why it does not answer."""
        return self.trouble or f"its last answer was of step {self.last_answer}"

    @property
    def is_unsettled(self) -> bool:
        """Whether its note may say why it does not answer."""
        return (
            self.address is None
            or bool(self.trouble)
            or (self.sender is not None and self.stream is None)
            or self.is_silent
        )

    def awaited(
        self,
        own: message_lib.Message,
        end: float,
        *,
        clock: Callable[[], float],
        is_open: Callable[[], bool],
    ) -> message_lib.Message | None:
        """Waits for its message of one's own step, if that is worth it."""
        while True:
            # Another one once the peer has started again.
            box = self.boxes.setdefault(own.replica, {})
            received = box.pop(own.step, None)
            left = end - clock()
            is_behind = self.newest.get(own.replica, -1) < own.step
            is_worth_it = is_open() and is_behind and not self.is_silent
            if received is not None or left <= 0 or not is_worth_it:
                break
            self.arrived.wait(left)
        for old in [s for s in box if s < own.step]:
            del box[old]
        if received is None and left <= 0 and not self.is_silent:
            self.num_silent += 1
        return received

    def keep(self, message: message_lib.Message, num_bytes: int) -> int:
        """Keeps a message; the newest step before, if it goes back too far."""
        box = self.boxes.setdefault(message.replica, {})
        newest = self.newest.get(message.replica, -1)
        goes_back = message.step < newest - MAX_KEPT
        if goes_back:
            box.clear()
            del self.newest[message.replica]
        box[message.step] = message
        if len(box) > MAX_KEPT:
            del box[min(box)]
        self.newest[message.replica] = max(
            self.newest.get(message.replica, -1), message.step
        )
        self.received_bytes += num_bytes
        self.last_bytes = num_bytes
        self.num_silent, self.trouble = 0, ""
        # Steps that wait for another peer sleep on.
        self.arrived.notify_all()
        return newest if goes_back else 0

    def refuse(self, kind: str, reason: str, *, step: int) -> None:
        """Counts a message that does not count."""
        self.num_refused[kind] += 1
        self.refused[step] = f"{reason}."
        if len(self.refused) > _MAX_LISTED:
            del self.refused[min(self.refused)]

    def write(self, content: bytes, *, most: int) -> None:
        """Sends a framed message, if the peer wants it, in the event loop.

        The newest ones, at most `most`, are kept for its next connection.
        """
        if self.address is not None and self.sender is None:
            return
        self.recent.append(content)
        if len(self.recent) > most:
            self.recent.popleft()
        stream = self.stream
        if (
            stream is None
            or stream.get_write_buffer_size() >= _MAX_QUEUED * len(content)
        ):
            self.num_unsent += 1
            return
        stream.write(content)
        self.sent_bytes += len(content) - _LENGTH.size

    def forget(self) -> None:
        """Lets go of one incarnation of it; its figures stay."""
        if self.sender is not None:
            self.sender.cancel()
        self.address = self.sender = self.stream = None
        with self.arrived:
            self.boxes.clear()
            self.newest.clear()
            self.num_silent = 0


class Mailbox:
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
        self._lock = threading.Lock()
        groups = {*peers, *others} - {place.group}
        self._peers = {g: Peer(g, self._lock) for g in sorted(groups)}
        self.learns_from = tuple(peers)
        self._wake = threading.Event()
        # Where it listens once it is open.
        self.port = 0
        self._is_open, self._incarnation = False, b""
        self._said: set[tuple[int, str]] = set()
        self._most_own_bytes = 0
        # Messages of which nobody knows who has sent them, by kind.
        self.num_forged: collections.Counter[str] = collections.Counter()

    def peer(self, group: int) -> Peer:
        """Returns what is known of a peer."""
        return self._peers[group]

    # ---- open and closed ----

    def start(self) -> None:
        """Opens the mailbox, and looks for those of the peers."""
        if self._is_open or not self._exchange.enabled:
            return
        is_dual = socket.has_dualstack_ipv6()
        listener = socket.create_server(
            ("", 0),
            family=socket.AF_INET6 if is_dual else socket.AF_INET,
            dualstack_ipv6=is_dual,
        )
        self.port = listener.getsockname()[1]
        self._incarnation = secrets.token_bytes(16)
        self._wake.clear()
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._is_open = True
        self._threads = [
            threading.Thread(target=work, args=args, name=name, daemon=True)
            for work, args, name in (
                (self._carry, [listener], "tfdistill-mailbox"),
                (self._look, [], "tfdistill-peers"),
            )
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Closes the mailbox; a step that waits for it goes on at once."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            for peer in self._peers.values():
                peer.arrived.notify_all()
            self._loop.call_soon_threadsafe(self._closing.set)
        self._wake.set()
        for thread in self._threads:
            thread.join(_STOP_SECS)

    def _carry(self, listener: socket.socket) -> None:
        # All other tasks are cancelled at its end.
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(listener))

    async def _serve(self, listener: socket.socket) -> None:
        """Moves all messages, until the mailbox is closed."""
        server = await asyncio.start_server(
            self._hear, sock=listener, limit=_SPARE_BYTES
        )
        await self._closing.wait()
        server.close()
        for peer in self._peers.values():
            peer.forget()
            peer.recent.clear()

    # ---- a step ----

    def send(
        self,
        *,
        step: int,
        replica: int,
        batch: bytes,
        classes: Sequence[int],
        arrays: Sequence[np.ndarray],
    ) -> message_lib.Message:
        """Sends a replica's predictions; what they were, for `answers`."""
        own = message_lib.Message(
            self._place.group,
            replica,
            step,
            self._incarnation,
            batch,
            tuple(classes),
            tuple(arrays),
        )
        data = message_lib.encode(own, self._exchange.signer)
        # The last batch may be smaller, here or there.
        self._most_own_bytes = max(self._most_own_bytes, len(data))
        if len(data) >= MAX_BYTES:
            self._warn_once(
                self._place.group,
                "size",
                f"A message must have less than {MAX_BYTES} bytes; that of "
                f"step {step} has {len(data)} and is not sent. Send less: "
                "PeerPredictions(encoding=Form(top_k=...)).",
            )
            return own
        with self._lock:
            if self._is_open:
                self._loop.call_soon_threadsafe(self._write, data)
        return own

    def answers(
        self, own: message_lib.Message
    ) -> list[tuple[np.ndarray, ...] | None]:
        """Waits for what peers say of the batch of one's own message.

        In the order of `learns_from`; None for a peer that does not answer.
        """
        end = self._clock() + self._wait_secs
        with self._lock:
            return [
                self._answer(self._peers[group], own, end)
                for group in self.learns_from
            ]

    def _answer(
        self, peer: Peer, own: message_lib.Message, end: float
    ) -> tuple[np.ndarray, ...] | None:
        step = own.step
        peer.last_asked = max(step, peer.last_asked)
        was_silent = peer.is_silent
        received = peer.awaited(
            own, end, clock=self._clock, is_open=lambda: self._is_open
        )
        if peer.is_silent and not was_silent:
            self._warn_once(
                peer.group,
                "silent",
                f"Group {peer.group} sends no predictions: {peer.why}. "
                "Training goes on without them. It waits no more until they "
                "come again; the status of the teachers counts.",
            )
        refusal = received and message_lib.refusal(received, own)
        if received is None or refusal:
            peer.num_missed += 1
            if refusal:
                self._refuse(peer, *refusal, step=step)
            return None
        peer.num_answers += 1
        peer.last_answer = max(step, peer.last_answer)
        if message_lib.has_faults(received):
            # Its other rows are good: the step leaves out those that are not
            # finite.
            self._refuse(
                peer,
                "finite",
                "its predictions must be finite; those of some examples are "
                "NaN or infinite, and do not count",
                step=step,
            )
        return received.arrays

    # ---- to peers, in the event loop ----

    def _write(self, data: bytes) -> None:
        """Sends a message to all who want it."""
        for peer in self._peers.values():
            peer.write(framed(data), most=MAX_KEPT * len(self._place.replicas))

    async def _send(self, peer: Peer, address: addresses.Address) -> None:
        """Sends to one incarnation of a peer, until it is forgotten."""
        pause = background.Backoff(first_secs=0.1, longest_secs=1.0)
        while True:
            opened = self._clock()
            reason = await _send_all(peer, address, self._exchange.signer)
            if self._clock() - opened > _LASTED_SECS:
                pause.succeeded()
            peer.trouble = f"it does not take messages: {reason}"
            self._wake.set()
            await asyncio.sleep(pause.failed())

    # ---- from peers, in the event loop ----

    async def _hear(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Takes a guest's messages, until it breaks a rule or goes."""
        try:
            _keep_alive(writer)
            wanted = pass_to(
                self._place.group, self._incarnation, self._exchange.signer
            )
            async with asyncio.timeout(_MEET_SECS):
                shown = await reader.readexactly(len(wanted))
            if not hmac.compare_digest(shown, wanted):
                self._refuse_unknown(
                    "forged",
                    "whoever connects must have this run's key and this "
                    "mailbox's address of now",
                )
                return
            while True:
                size = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))[0]
                if self._is_too_large(size):
                    return
                if not self._take(await reader.readexactly(size)):
                    return
        except (OSError, EOFError, asyncio.CancelledError):
            # It has gone, and comes again if it is a peer; or the mailbox is
            # closed, of which Python 3.11 would log the cancelled task.
            return
        finally:
            writer.transport.abort()

    def _is_too_large(self, num_bytes: int) -> bool:
        """Whether a message has more bytes than one that could count."""
        own = self._most_own_bytes
        most = 2 * own + _SPARE_BYTES if own else MAX_BYTES
        if num_bytes <= min(most, MAX_BYTES):
            return False
        self._refuse_unknown(
            "size",
            f"it must have about as many bytes as one's own, {own}; received "
            f"{num_bytes}",
        )
        return True

    def _take(self, data: bytes) -> bool:
        """Takes a message; whether more may follow in its connection."""
        try:
            message = message_lib.decode(data, self._exchange.signer)
        except message_lib.MessageError as error:
            self._refuse_unknown("forged", str(error))
            return False
        if message.group not in self.learns_from:
            self._refuse_unknown(
                "sender",
                f"it must come from one of the groups {self.learns_from}; "
                f"received one of group {message.group}",
            )
            return False
        peer = self._peers[message.group]
        known = peer.address and peer.address.incarnation
        if message.incarnation != known:
            # It has just started, and its note is not read yet; or it is of an
            # earlier run, and its note is that of another. It tries again.
            peer.trouble = "it has started again"
            self._wake.set()
            return False
        with self._lock:
            if message.replica in self._place.replicas:
                self._keep(peer, message, len(data))
            else:
                self._refuse(
                    peer,
                    "replica",
                    f"it must be for one of {list(self._place.replicas)}; "
                    f"received replica {message.replica}",
                    step=message.step,
                )
        return True

    def _keep(
        self, peer: Peer, message: message_lib.Message, num_bytes: int
    ) -> None:
        if newest := peer.keep(message, num_bytes):
            # It has never been there, or it would have started again.
            self._refuse(
                peer,
                "step",
                f"its steps must not go back; received it after step {newest}",
                step=message.step,
            )

    # ---- addresses ----

    def _look(self) -> None:
        """Leaves this worker's address, and finds those of the peers."""
        is_left = False
        pause = background.Backoff(
            first_secs=_LOOK_SECS, longest_secs=_LONGEST_LOOK_SECS
        )
        while self._is_open:
            unsettled = [p for p in self._peers.values() if p.is_unsettled]
            is_done = is_left and not unsettled
            if is_done:
                pause.succeeded()
            elif pause.is_over:
                is_left = is_left or self._leave_note()
                if any([self._look_for(peer) for peer in unsettled]):
                    pause.succeeded()
                else:
                    pause.failed()
            self._wake.wait(_LONGEST_LOOK_SECS if is_done else _LOOK_SECS)
            self._wake.clear()

    def _leave_note(self) -> bool:
        """Leaves this worker's address; whether that has worked."""
        place = self._place
        own = addresses.Address(
            place.host or socket.gethostname(),
            self.port,
            self._incarnation,
            place.replicas,
            self.learns_from,
        )
        try:
            own.leave(self._exchange, place.group, place.worker)
            return True
        except OSError as error:
            _log.warning("Could not leave an address: %s", error)
            return False

    def _look_for(self, peer: Peer) -> bool:
        """Reads a peer's note; whether its address is another one."""
        try:
            found = addresses.Address.find(
                self._exchange, peer.group, self._place.worker
            )
        except OSError as error:
            peer.trouble = f"its address cannot be read: {error}"
            return False
        if found is None or found == peer.address:
            return False
        with self._lock:
            if self._is_open:
                self._loop.call_soon_threadsafe(self._meet, peer, found)
        return True

    def _meet(self, peer: Peer, address: addresses.Address) -> None:
        """Takes a peer for what its note says, in the event loop."""
        if address == peer.address:
            return
        peer.forget()
        peer.address, peer.trouble = address, ""
        if address.replicas != self._place.replicas:
            peer.trouble = (
                f"its worker {self._place.worker} has the replicas "
                f"{list(address.replicas)}, and this one "
                f"{list(self._place.replicas)}. Use equally many workers and "
                "replicas in all groups"
            )
            self._warn_once(peer.group, "replica", peer.trouble)
        elif self._place.group in address.learns_from:
            peer.sender = self._loop.create_task(self._send(peer, address))
        if peer.sender is None:
            peer.recent.clear()

    # ---- what was refused ----

    def _refuse(self, peer: Peer, kind: str, reason: str, *, step: int) -> None:
        peer.refuse(kind, reason, step=step)
        self._warn_once(
            peer.group,
            kind,
            f"A message of group {peer.group}, step {step}, does not count: "
            f"{reason}. Training goes on; more of its kind are counted.",
        )

    def _refuse_unknown(self, kind: str, reason: str) -> None:
        self.num_forged[kind] += 1
        self._warn_once(
            -1,
            kind,
            f"A message was refused: {reason}. More of its kind are counted.",
        )

    def _warn_once(self, group: int, kind: str, text: str) -> None:
        if (group, kind) not in self._said:
            self._said.add((group, kind))
            _log.warning("%s", text)


async def _send_all(
    peer: Peer, address: addresses.Address, signer: signing.Signer | None
) -> str:
    """Sends until the connection breaks; why it has."""
    try:
        async with asyncio.timeout(_MEET_SECS):
            reader, writer = await asyncio.open_connection(
                address.host, address.port
            )
    except (OSError, UnicodeError) as error:
        return str(error) or "it cannot be reached"
    try:
        _keep_alive(writer)
        shown = pass_to(peer.group, address.incarnation, signer)
        writer.writelines([shown, *peer.recent])
        peer.stream = writer.transport
        # A peer says nothing; this ends when the connection does.
        await reader.read(1)
        return "it has closed the connection"
    except OSError as error:
        return str(error)
    finally:
        if peer.stream is writer.transport:
            peer.stream = None
        writer.transport.abort()


def pass_to(
    group: int, incarnation: bytes, signer: signing.Signer | None
) -> bytes:
    """Returns what a connection to a mailbox begins with.

    Without a key, one must at least have read the mailbox's note.
    """
    text = f"pass to mailbox {incarnation.hex()} of group {group}"
    return message_lib.proof(text.encode(), signer)


def framed(data: bytes) -> bytes:
    """Returns a message as it is sent, after its length."""
    return _LENGTH.pack(len(data)) + data


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
