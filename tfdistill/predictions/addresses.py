"""Where the mailboxes of workers are: signed notes in the exchange."""

import dataclasses
from typing import Any

from tfdistill.exchange import publisher
from tfdistill.system import processes


@dataclasses.dataclass(frozen=True)
class Address:
    """Where a worker's mailbox is.

    Attributes:
        host, port: Of the mailbox.
        incarnation: 16 bytes, another one for each start of it.
        replicas: The worker's.
        learns_from: Groups whose predictions it takes.
    """

    host: str
    port: int
    incarnation: bytes
    replicas: tuple[int, ...]
    learns_from: tuple[int, ...]

    @classmethod
    def find(
        cls, exchange: publisher.Exchange, group: int, worker: int
    ) -> "Address | None":
        """Reads a worker's note; None without a right one."""
        return cls._of(exchange.notes(group).read(_name(worker)))

    def leave(
        self, exchange: publisher.Exchange, group: int, worker: int
    ) -> None:
        """Writes a worker's note."""
        note = dataclasses.asdict(self) | {
            "incarnation": self.incarnation.hex(),
            "machine": processes.machine(),
        }
        exchange.notes(group).write(_name(worker), note)

    @classmethod
    def _of(cls, note: dict[str, Any] | None) -> "Address | None":
        note = note or {}
        try:
            found = cls(
                str(note["host"]),
                int(note["port"]),
                bytes.fromhex(note["incarnation"]),
                tuple(map(int, note["replicas"])),
                tuple(map(int, note["learns_from"])),
            )
        except (KeyError, TypeError, ValueError):
            return None
        is_right = 0 < found.port < 2**16 and len(found.incarnation) == 16
        if not is_right or not 0 < len(found.host) < 256:
            return None
        if note.get("machine") and note["machine"] == processes.machine():
            return dataclasses.replace(found, host="127.0.0.1")
        return found


def _name(worker: int) -> str:
    return f"mailbox-{worker}"
