"""Where the mailboxes of workers are: signed notes in the exchange."""

import dataclasses
import socket

from tfdistill.exchange import publisher


@dataclasses.dataclass(frozen=True)
class Address:
    """Where a worker's mailbox is, and which replicas it is for."""

    host: str
    port: int
    # 16 bytes, others for each start of the mailbox.
    incarnation: bytes
    replicas: tuple[int, ...]

    @classmethod
    def find(
        cls, exchange: publisher.Exchange, group: int, worker: int
    ) -> "Address | None":
        """Reads a worker's note; None without a right one."""
        note = exchange.notes(group).read(_name(worker)) or {}
        # Its own name may not be one that a machine finds.
        is_here = note.get("host") == socket.gethostname()
        try:
            return cls(
                "127.0.0.1" if is_here else str(note["host"]),
                int(note["port"]),
                bytes.fromhex(note["incarnation"]),
                tuple(map(int, note["replicas"])),
            )
        except (ArithmeticError, KeyError, TypeError, ValueError):
            return None

    def leave(
        self, exchange: publisher.Exchange, group: int, worker: int
    ) -> None:
        """Writes a worker's note."""
        note = dataclasses.asdict(self) | {
            "incarnation": self.incarnation.hex(),
        }
        exchange.notes(group).write(_name(worker), note)


def _name(worker: int) -> str:
    return f"mailbox-{worker}"
