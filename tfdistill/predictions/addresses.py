"""Where the mailboxes of workers are: signed notes in the exchange."""

import dataclasses
import socket

from tfdistill.exchange import publisher
from tfdistill.system import processes


@dataclasses.dataclass(frozen=True)
class Address:
    """Where a worker's mailbox is, and which replicas it is for."""

    # Names and addresses of its machine, of which one is enough.
    hosts: tuple[str, ...]
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
        try:
            hosts = [str(note["host"]), *map(str, note.get("addresses", []))]
            if note.get("machine") == processes.machine():
                # Its own name may not be one that a machine finds.
                hosts = ["127.0.0.1"]
            return cls(
                tuple(hosts),
                int(note["port"]),
                bytes.fromhex(note["incarnation"]),
                tuple(map(int, note["replicas"])),
            )
        except (ArithmeticError, KeyError, TypeError, ValueError):
            return None


def leave(
    exchange: publisher.Exchange,
    group: int,
    worker: int,
    *,
    host: str,
    port: int,
    incarnation: bytes,
    replicas: tuple[int, ...],
) -> None:
    """Writes this worker's note; `host` is by default this machine's name.

    Others may find another machine by that name, or none: it has the addresses
    as well.
    """
    note = {
        "host": host or socket.gethostname(),
        "addresses": processes.own_addresses(),
        "machine": processes.machine(),
        "port": port,
        "incarnation": incarnation.hex(),
        "replicas": replicas,
    }
    exchange.notes(group).write(_name(worker), note)


def _name(worker: int) -> str:
    return f"mailbox-{worker}"
