"""Connections from outside: each shows a pass, then brings messages."""

import asyncio
import hmac
import socket
import struct
import sys
from collections.abc import Callable

from tfdistill.exchange import signing
from tfdistill.predictions import message as message_lib

# In which a connection begins with a pass.
MEET_SECS = 5.0
# A message must be smaller; more is refused before it is read.
MAX_BYTES = 64 * 2**20
# After which a connection counts as lost whose other end has gone without a
# word.
_LOST_MILLISECONDS = 15_000
# Connections that have not shown a pass yet; one more closes the oldest.
MAX_WITHOUT_PASS = 64
# Before each message.
LENGTH = struct.Struct("<I")


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
    return LENGTH.pack(len(data)) + data


def notice_loss(connection: socket.socket) -> None:
    """Makes what is sent in a connection fail once its other end is gone."""
    if sys.platform == "linux":
        connection.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _LOST_MILLISECONDS
        )


class Guests:
    """Takes what connections bring; all of it runs in one event loop.

    Attributes:
        hearing: The tasks of all connections: asyncio does not keep them.
    """

    def __init__(
        self,
        wanted: bytes,
        *,
        take: Callable[[bytes], bool],
        refuse: Callable[[str, str], None],
    ) -> None:
        """Opens nothing; `wanted` is the pass.

        `take` takes a message and returns whether more may follow. `refuse`
        takes the kind and the reason of what breaks a rule.
        """
        self._wanted, self._take, self._refuse = wanted, take, refuse
        self._is_closed = False
        # The oldest is first.
        self._without_pass: dict[asyncio.WriteTransport, None] = {}
        self.hearing: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        """Turns away all connections from now on."""
        self._is_closed = True

    def welcome(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Takes what a connection brings, and closes it however that ends."""
        connection = writer.transport
        if self._is_closed:
            connection.abort()
            return
        self._without_pass[connection] = None
        if len(self._without_pass) > MAX_WITHOUT_PASS:
            self._close(next(iter(self._without_pass)))
            self._refuse("crowd", "too many connections arrived without a pass")
        hearing = asyncio.create_task(self._hear(reader, connection))
        self.hearing.add(hearing)
        # Also if it is cancelled before it begins, as the mailbox closes.
        hearing.add_done_callback(lambda _: self._close(connection))
        hearing.add_done_callback(self.hearing.discard)

    def _close(self, connection: asyncio.WriteTransport) -> None:
        self._without_pass.pop(connection, None)
        connection.abort()

    async def _hear(
        self, reader: asyncio.StreamReader, connection: asyncio.WriteTransport
    ) -> None:
        """Takes a connection's messages, until one breaks a rule or it ends."""
        try:
            async with asyncio.timeout(MEET_SECS):
                shown = await reader.readexactly(len(self._wanted))
            if not hmac.compare_digest(shown, self._wanted):
                self._refuse(
                    "forged",
                    "a connection must have this run's key and this mailbox's "
                    "current address",
                )
                return
            self._without_pass.pop(connection, None)
            is_good = True
            while is_good:
                size = LENGTH.unpack(await reader.readexactly(LENGTH.size))[0]
                if size > MAX_BYTES:
                    self._refuse(
                        "size",
                        f"it must have at most {MAX_BYTES} bytes; received "
                        f"{size}",
                    )
                    return
                is_good = self._take(await reader.readexactly(size))
        except (OSError, EOFError):
            return  # It has gone, and comes again if it is a peer.
