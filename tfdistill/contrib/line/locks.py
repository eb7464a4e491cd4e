"""How one writer at a time writes to a line, on a disk or in a store."""

import contextlib
import fcntl
import json
import os
import pathlib
import socket
import time
import uuid
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

from tfdistill.exchange import filesystem
from tfdistill.exchange import notes
from tfdistill.system import processes
from tfdistill.system import run_files
from tfdistill.system import untrusted

# In a store: how long a lock lasts whose holder has died, and how long another
# may take from finding none to writing its own.
_LEASE_SECS, _SETTLE_SECS = 20.0, 0.25
_NAME = "owner"


class BusyError(RuntimeError):
    """Another process is at work on the line."""


def _own(what: str) -> dict[str, Any]:
    return {
        "what": what,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "machine": processes.machine(),
    }


def _busy(place: str, holder: Mapping[str, Any], what: str) -> BusyError:
    who = "`{what}` of process {pid} on {host}".format_map(
        {**dict.fromkeys(_own("")), **holder}
    )
    return BusyError(
        "One command at a time may write to a line: "
        f"{untrusted.one_line(who)} holds {place}, and this is `{what}`. Run "
        "it again once that is done."
    )


@contextlib.contextmanager
def of_file(
    path: str, what: str, *, wait_secs: float = 0.0
) -> Iterator[Callable[[], None]]:
    """Holds a lock that the kernel frees when this process ends."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    try:
        file = run_files.locked(path, wait_secs=wait_secs)
    except BlockingIOError as error:
        holder = untrusted.json_object(pathlib.Path(path).read_bytes()) or {}
        raise _busy(path, holder, what) from error
    with file:
        try:
            file.truncate(0)
            file.write(json.dumps(_own(what)).encode())
            yield lambda: None
        finally:
            # For a process forked meanwhile, which has the file open, too.
            fcntl.flock(file, fcntl.LOCK_UN)


@contextlib.contextmanager
def in_store(
    files: filesystem.FileSystem, root: str, what: str
) -> Iterator[Callable[[], None]]:
    """Holds owner.json, which names the writer, and until when.

    A store cannot refuse the second of two writes. Both then read it back
    after a while, longer than a request should take, and right before they
    write anything: the one that finds the other's ends.
    """
    note = notes.Notes(files, root, group=0, signer=None)
    path, deadline = note.path(_NAME), time.monotonic() + 2 * _LEASE_SECS
    while (found := note.read(_NAME)) and _is_alive(found):
        if time.monotonic() >= deadline:
            raise _busy(path, found, what)
        time.sleep(_SETTLE_SECS)
    own = {**_own(what), "token": uuid.uuid4().hex}
    own["until"] = time.time() + _LEASE_SECS
    note.write(_NAME, own)

    def confirm() -> None:
        found = note.read(_NAME) or {}
        if found != own or not time.time() < own["until"]:
            raise _busy(path, found, what)

    time.sleep(_SETTLE_SECS)
    confirm()
    try:
        yield confirm
    finally:
        with contextlib.suppress(OSError, BusyError):
            confirm()
            note.remove(_NAME)


def _is_alive(holder: Mapping[str, Any]) -> bool:
    if holder.get("machine") == processes.machine():
        try:
            os.kill(int(holder["pid"]), 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
    return time.time() < holder.get("until", 0)
