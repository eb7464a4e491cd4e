"""The launcher's own files: its lock, its record and the tasks' logs."""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import socket
import time
from collections.abc import Iterator
from collections.abc import Mapping
from typing import IO

from tfdistill.cluster import signs
from tfdistill.exchange import signing
from tfdistill.launcher import local_cluster
from tfdistill.status import directory
from tfdistill.status import logs
from tfdistill.status import run_events
from tfdistill.system import run_files
from tfdistill.system import untrusted

_NUM_LAST_LINES = 20
_TAIL_BYTES = 32768
_LOCK_SECS = 0.08


@contextlib.contextmanager
def _written_to(topology: local_cluster.LocalCluster) -> Iterator[None]:
    try:
        yield
    except OSError as cause:
        raise ValueError(
            "`workdir` must be a directory that can be written to; received "
            f"{topology.workdir!r}: {cause.strerror}. Choose another."
        ) from cause


def lock(topology: local_cluster.LocalCluster) -> IO[bytes]:
    """Makes sure that no other launcher is at work in the same directory.

    Returns a file to be kept open: closing it, or dying, gives up the lock.
    ValueError if another launcher has it, or nothing can be written.
    """
    path = topology.logs_dir / directory.LOCK
    with _written_to(topology):
        path.parent.mkdir(parents=True, exist_ok=True)
        # `tfdistill status` holds it for a moment, to see whether it is free.
        with contextlib.suppress(BlockingIOError):
            return run_files.locked(path, wait_secs=_LOCK_SECS)
    raise ValueError(
        "`workdir` must not be in use by another launcher; received "
        f"{topology.workdir!r}. Wait for that run, stop it, or choose "
        "another directory."
    )


def ensure_key(
    topology: local_cluster.LocalCluster, environ: Mapping[str, str]
) -> None:
    """Makes the key of the run, unless the tasks inherit a good one."""
    if signing.has_key(environ):
        signing.signer_for("environment", environ)
    else:
        with _written_to(topology):
            signing.make_file(topology.key_path)


def make_room(topology: local_cluster.LocalCluster) -> list[str]:
    """Renames the files of an earlier run; returns the new names."""
    ready_dir = topology.logs_dir / "ready"
    with _written_to(topology):
        if ready_dir.exists():
            shutil.rmtree(ready_dir)
        ready_dir.mkdir()
    run = directory.RunDirectory(topology.workdir)
    old = [log for group in run.groups() for log in run.logs(group)]
    others = [_record_path(topology), events_path(topology)]
    old += [path for path in others if path.exists()]
    number = 1
    while any(_numbered(path, number).exists() for path in old):
        number += 1
    return [str(path.rename(_numbered(path, number))) for path in sorted(old)]


def events_path(topology: local_cluster.LocalCluster) -> pathlib.Path:
    """Returns the file of the run's events."""
    return topology.logs_dir / run_events.NAME


def forget_progress(ready_path: pathlib.Path) -> None:
    """Removes what an earlier task with this ready file has reported."""
    for suffix in signs.SUFFIXES:
        path = ready_path.with_name(ready_path.name + suffix)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def open_log(path: pathlib.Path) -> IO[bytes]:
    """Opens a task's log to add to it; if that cannot be, what is lost."""
    try:
        return path.open("ab")
    except OSError:
        return open(os.devnull, "ab")


def mark_restart(path: pathlib.Path, attempt: int) -> None:
    """Begins the part of a log that belongs to another start of its group."""
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as file:
        file.write(f"===== {now}: start {attempt} of the group =====\n")


def _numbered(path: pathlib.Path, number: int) -> pathlib.Path:
    return path.with_suffix(f".{number}{path.suffix}")


def _record_path(topology: local_cluster.LocalCluster) -> pathlib.Path:
    return pathlib.Path(topology.workdir, directory.RECORD)


def write_record(topology: local_cluster.LocalCluster) -> None:
    """Writes launch.json: what was launched; events have the rest."""
    record = {
        "topology": dataclasses.asdict(topology),
        "host": socket.gethostname(),
    }
    text = json.dumps(record, indent=2) + "\n"
    with _written_to(topology):
        run_files.write(_record_path(topology), [text.encode()])


def quote(path: pathlib.Path) -> list[str]:
    """Returns the last lines of a log as a message."""
    lines = last_lines(path)
    return [f"--- last {len(lines)} lines of {path}", *lines, "---"]


def last_lines(path: pathlib.Path) -> list[str]:
    """Returns the last lines of a log, at most twenty, as plain text.

    If a line was overwritten in place, as progress bars are, only the text that
    was visible in the end is returned; if a log cannot be read, nothing.
    """
    try:
        text = logs.tail(path, _TAIL_BYTES)
    except OSError:
        return []
    lines = text.replace("\r\n", "\n").rstrip("\n").split("\n")
    shown = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
    told = [untrusted.without_control(x) for x in shown if not logs.is_noise(x)]
    return told[-_NUM_LAST_LINES:]
