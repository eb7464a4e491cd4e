"""The mailbox of one worker: predictions to peers, and theirs of the same step.

Each worker of a group sends to the worker of the same index in each of its
peers, in one connection that stays. A thread with an event loop moves
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
import concurrent.futures
import itertools
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from tfdistill.exchange import publisher
from tfdistill.predictions import addresses
from tfdistill.predictions import guests
from tfdistill.predictions import message as message_lib
from tfdistill.system import background
from tfdistill.system import processes
from tfdistill.system import untrusted

# Steps of a sender that are kept, each way: how far it may be ahead.
MAX_KEPT = 16
# Waits in a row, without a sign of life, after which there are no more.
MAX_SILENT = 3
_MAX_LISTED = 10
_STOP_SECS = 5.0
# Messages that wait in a connection, of which a peer takes none.
_MAX_QUEUED = 32
# Between two looks at the note of a peer, or tries to connect.
_FIRST_SECS, _LONGEST_SECS = 0.1, 2.0
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


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
        last_bytes: Size of the last message from it; None before.
    """

    def __init__(self, group: int, most: int) -> None:
        self.group = group
        self.num_answers = self.num_missed = self.num_unsent = 0
        self.num_refused: collections.Counter[str] = collections.Counter()
        self.refused: dict[int, str] = {}
        self.last_asked = self.last_answer = -1
        self.sent_bytes = self.received_bytes = 0
        self.last_bytes: int | None = None
        self.trouble = "its address is not known yet"
        # Shared by steps and the event loop, under the mailbox's lock. By
        # replica: messages by step, as they came, and the step of the last.
        self.boxes: dict[int, dict[int, message_lib.Message]] = {}
        self.newest: dict[int, int] = {}
        self.num_silent = 0
        # Only the event loop changes what follows.
        self.address: addresses.Address | None = None
        # Where it is looked for next.
        self.hosts: Iterator[str] = iter(())
        # The newest messages to it, with which each connection begins.
        self.recent: collections.deque[bytes] = collections.deque((), most)
        self.stream: asyncio.WriteTransport | None = None

    @property
    def is_silent(self) -> bool:
        """Whether steps no longer wait for it."""
        return self.num_silent >= MAX_SILENT

    @property
    def why(self) -> str:
        """Why it does not answer."""
        return (
            self.trouble or f"its last answer was for step {self.last_answer}"
        )

    def keep(self, message: message_lib.Message, num_bytes: int) -> None:
        """Keeps a message, and lets go of the one that came first."""
        box = self.boxes.setdefault(message.replica, {})
        box[message.step] = message
        if len(box) > MAX_KEPT:
            del box[next(iter(box))]
        self.newest[message.replica] = message.step
        self.received_bytes += num_bytes
        self.last_bytes = num_bytes
        self.num_silent, self.trouble = 0, ""

    def take_message(
        self, step: int, replica: int
    ) -> message_lib.Message | None:
        """Returns a step's message, and drops the messages of older steps."""
        box = self.boxes.get(replica, {})
        for old in [s for s in box if s < step]:
            del box[old]
        return box.pop(step, None)

    def forget(self) -> None:
        """Drops all messages, because the peer has restarted."""
        self.boxes.clear()
        self.newest.clear()
        self.num_silent = 0

    def refuse(self, kind: str, reason: str, step: int) -> None:
        """Counts a message that isn't used, and keeps the reason."""
        self.num_refused[kind] += 1
        self.refused[step] = f"{reason}."
        if len(self.refused) > _MAX_LISTED:
            del self.refused[min(self.refused)]

    def write(self, content: bytes) -> None:
        """Sends a framed message, now or when the peer is there."""
        self.recent.append(content)
        stream = self.stream
        if (
            stream is None
            or stream.get_write_buffer_size() >= _MAX_QUEUED * len(content)
        ):
            self.num_unsent += 1
            return
        stream.write(content)
        self.sent_bytes += len(content) - guests.LENGTH.size


class Mailbox:
    """Sends one worker's predictions, and keeps what peers send."""

    def __init__(
        self,
        exchange: publisher.Exchange,
        *,
        group: int,
        worker: int,
        replicas: tuple[int, ...],
        peers: Sequence[int],
        host: str = "",
        wait_secs: float = 0.05,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Opens nothing yet.

        It learns from the groups `peers`, which learn from it. A step waits for
        all of them together for `wait_secs` at most. `host` is where other
        machines reach it, by default this machine's name.
        """
        self._exchange = exchange
        self._group, self._worker, self._replicas = group, worker, replicas
        self._host = host
        self._wait_secs = wait_secs
        self._clock = clock
        # And the lock of all that steps and the event loop share.
        self._arrived = threading.Condition()
        most = MAX_KEPT * len(replicas)
        self._peers = {g: Peer(g, most) for g in peers}
        # Where it listens once it is open.
        self.port = 0
        self._is_open, self._incarnation = False, b""
        # Whether peers can read where this mailbox is.
        self._is_listed = False
        self._said: set[tuple[int, str]] = set()
        # Messages whose sender is unknown, by kind.
        self.num_forged: collections.Counter[str] = collections.Counter()

    def peer(self, group: int) -> Peer:
        """Returns what is known of a peer."""
        return self._peers[group]

    # ---- open and closed ----

    def start(self) -> None:
        """Opens the mailbox, and looks for the peers' mailboxes."""
        if self._is_open or not self._exchange.enabled:
            return
        listener = processes.listener(0)
        self.port = listener.getsockname()[1]
        self._incarnation = secrets.token_bytes(16)
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._is_open, self._is_listed = True, False
        self._thread = threading.Thread(
            target=self._carry,
            args=[listener],
            name="tfdistill-mailbox",
            daemon=True,
        )
        self._thread.start()

    def stop(self) -> None:
        """Closes the mailbox; a step that waits for it continues at once."""
        with self._arrived:
            if not self._is_open:
                return
            self._is_open = False
            self._arrived.notify_all()
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(_STOP_SECS)

    def _carry(self, listener: socket.socket) -> None:
        # All other tasks are cancelled at its end.
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(listener))

    async def _serve(self, listener: socket.socket) -> None:
        """Moves all messages, until the mailbox is closed."""
        own = guests.pass_to(
            self._group, self._incarnation, self._exchange.signer
        )
        self._guests = guests.Guests(own, take=self._take, refuse=self._refuse)
        # Few are accepted before the first is looked at.
        server = await asyncio.start_server(
            self._guests.welcome, sock=listener, backlog=16
        )
        following = [
            self._loop.create_task(self._follow(peer))
            for peer in self._peers.values()
        ]
        await self._closing.wait()
        for task in following:
            task.cancel()
        # Closed at once, it would leave open what asyncio is about to accept:
        # https://github.com/python/cpython/issues/109564
        self._loop.remove_reader(listener)
        self._guests.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        others -= self._guests.hearing
        await asyncio.gather(*others, return_exceptions=True)
        server.close()
        for peer in self._peers.values():
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
    ) -> message_lib.Own:
        """Sends a replica's predictions; what they were, for `answers`."""
        sender = self._group, replica, step, self._incarnation
        own = message_lib.own(sender, batch, classes, arrays)
        self.post(own.message)
        return own

    def post(self, message: message_lib.Message) -> None:
        """Sends a message to all peers."""
        data = message_lib.encode(message, self._exchange.signer)
        if len(data) >= guests.MAX_BYTES:
            self._warn_once(
                self._group,
                "size",
                f"A message must have less than {guests.MAX_BYTES} bytes; the "
                f"message of step {message.step} has {len(data)} and isn't "
                "sent. Send less: PeerPredictions(encoding=Form(top_k=...)).",
            )
            return
        content = guests.framed(data)
        with self._arrived:
            for peer in self._peers.values() if self._is_open else ():
                self._loop.call_soon_threadsafe(peer.write, content)

    def answers(
        self, own: message_lib.Own
    ) -> list[tuple[np.ndarray, ...] | None]:
        """Waits for the peers' predictions for the batch of this message.

        In the order of the peers; None for a peer that does not answer.
        """
        end = self._clock() + self._wait_secs
        with self._arrived:
            return [self._answer(p, own, end) for p in self._peers.values()]

    def _answer(
        self, peer: Peer, own: message_lib.Own, end: float
    ) -> tuple[np.ndarray, ...] | None:
        step = own.message.step
        peer.last_asked = max(step, peer.last_asked)
        received = self._awaited(peer, own.message, end)
        try:
            arrays = received and message_lib.answer(received, own)
        except untrusted.BadMessageError as error:
            arrays = None
            self._refuse(error.kind, str(error), peer=peer, step=step)
        if arrays is None:
            peer.num_missed += 1
            return None
        peer.num_answers += 1
        peer.last_answer = max(step, peer.last_answer)
        if message_lib.has_faults(arrays):
            # Its other rows are good: the step leaves out those that are not
            # finite.
            self._refuse(
                "finite",
                "its predictions must be finite; some examples' predictions "
                "are NaN or infinite, and aren't used",
                peer=peer,
                step=step,
            )
        return arrays

    def _awaited(
        self, peer: Peer, own: message_lib.Message, end: float
    ) -> message_lib.Message | None:
        """Waits for a peer's message of the same step, if that is worth it."""
        while True:
            received = peer.take_message(own.step, own.replica)
            left = end - self._clock()
            is_behind = peer.newest.get(own.replica, -1) < own.step
            is_worth_it = self._is_open and is_behind and not peer.is_silent
            if received is not None or left <= 0 or not is_worth_it:
                break
            self._arrived.wait(left)
        if received is None and left <= 0 and not peer.is_silent:
            peer.num_silent += 1
            if peer.is_silent:
                self._warn_once(
                    peer.group,
                    "silent",
                    f"Group {peer.group} sends no predictions: {peer.why}. "
                    "Training continues without them, and doesn't wait for "
                    "them until they arrive again; the teachers' status counts "
                    "the missing predictions.",
                )
        return received

    # ---- to peers, in the event loop ----

    def _look(self, group: int) -> addresses.Address | None:
        """Leaves one's own address, if it is not there yet; reads a peer's."""
        if not self._is_listed:
            addresses.leave(
                self._exchange,
                self._group,
                self._worker,
                host=self._host,
                port=self.port,
                incarnation=self._incarnation,
                replicas=self._replicas,
            )
            self._is_listed = True
        return addresses.Address.find(self._exchange, group, self._worker)

    async def _follow(self, peer: Peer) -> None:
        """Finds a peer, and sends to it until it is lost; again and again."""
        pause = background.Backoff(
            first_secs=_FIRST_SECS, longest_secs=_LONGEST_SECS
        )
        while True:
            host = ""
            try:
                found = await _in_thread(lambda: self._look(peer.group))
                if found is not None and found != peer.address:
                    self._meet(peer, found)
                    pause.succeeded()
                address = peer.address
                if address and address.replicas == self._replicas:
                    # A name may be another machine's, which hangs up, and a
                    # network not the one that both are in.
                    host = next(peer.hosts)
                    await self._send(peer, address, host)
            except (OSError, UnicodeError, OverflowError) as error:
                peer.trouble = f"it cannot be reached: {error!r}"
                if host and peer.address:
                    peer.trouble = _unreached(peer.address, host, error)
            await asyncio.sleep(pause.failed())

    def _meet(self, peer: Peer, address: addresses.Address) -> None:
        """Takes a peer for what its note says."""
        with self._arrived:
            peer.forget()
        peer.address, peer.trouble = address, ""
        peer.hosts = itertools.cycle(address.hosts)
        if address.replicas != self._replicas:
            peer.trouble = (
                f"its worker {self._worker} has the replicas "
                f"{list(address.replicas)}, and this worker "
                f"{list(self._replicas)}. Use the same number of workers and "
                "replicas in all groups"
            )
            self._warn_once(peer.group, "replica", peer.trouble)

    async def _send(
        self, peer: Peer, address: addresses.Address, host: str
    ) -> None:
        """Sends until the connection is lost."""
        async with asyncio.timeout(guests.MEET_SECS):
            reader, writer = await asyncio.open_connection(host, address.port)
        try:
            guests.notice_loss(writer.get_extra_info("socket"))
            shown = guests.pass_to(
                peer.group, address.incarnation, self._exchange.signer
            )
            writer.writelines([shown, *peer.recent])
            peer.stream, peer.trouble = writer.transport, ""
            # A peer says nothing; this ends when the connection does.
            await reader.read(1)
            peer.trouble = (
                "it closed the connection: it has ended, or this group isn't "
                "among its `peers`"
            )
        finally:
            if peer.stream is writer.transport:
                peer.stream = None
            writer.transport.abort()

    # ---- from peers, in the event loop ----

    def _take(self, data: bytes) -> bool:
        """Takes a message; whether more may follow in its connection."""
        try:
            message = message_lib.decode(data, self._exchange.signer)
        except untrusted.BadMessageError as error:
            self._refuse(error.kind, str(error))
            return False
        peer = self._peers.get(message.group)
        if peer is None:
            self._refuse(
                "sender",
                f"it must come from one of the groups {list(self._peers)}; it "
                f"came from group {message.group}",
            )
            return False
        known = peer.address and peer.address.incarnation
        if message.incarnation != known:
            # It has just started, and its note is not read yet; or it is from
            # an earlier run, and the note is another mailbox's. It tries again.
            peer.trouble = "it has restarted"
            return False
        with self._arrived:
            if message.replica in self._replicas:
                peer.keep(message, len(data))
                self._arrived.notify_all()
            else:
                self._refuse(
                    "replica",
                    f"it must be for one of {list(self._replicas)}; received "
                    f"replica {message.replica}",
                    peer=peer,
                    step=message.step,
                )
        return True

    # ---- what was refused ----

    def _refuse(
        self, kind: str, reason: str, *, peer: Peer | None = None, step: int = 0
    ) -> None:
        group, whose = -1, "A message"
        if peer is None:
            self.num_forged[kind] += 1
        else:
            group = peer.group
            whose = f"A message of group {group}, step {step},"
            peer.refuse(kind, reason, step)
        self._warn_once(
            group,
            kind,
            f"{whose} isn't used: {reason}. Training continues; further cases "
            "are only counted.",
        )

    def _warn_once(self, group: int, kind: str, text: str) -> None:
        if (group, kind) not in self._said:
            self._said.add((group, kind))
            _log.warning("%s", text)


def _unreached(address: addresses.Address, host: str, error: Exception) -> str:
    """Returns where a mailbox was looked for, and what became of that."""
    return (
        f"it cannot be reached at {' or '.join(address.hosts)}, port "
        f"{address.port} (of {host}: {error!r}). Open the ports between the "
        "hosts, or give TF_CONFIG an address of each task that the other "
        "groups' hosts find"
    )


async def _in_thread(work: Callable[[], _T]) -> _T:
    """Does what may wait for storage, in a thread that no end waits for."""
    future: concurrent.futures.Future[_T] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    future.set_running_or_notify_cancel()
    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(future)
