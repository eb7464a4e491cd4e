"""The launcher's own files: its lock, its record and the tasks' logs."""

import dataclasses
import fcntl
import json
import os
import pathlib
import re
import shutil
from collections.abc import Mapping
from typing import IO

from tfdistill import local_cluster
from tfdistill import signing

_NUM_LAST_LINES = 20
_TAIL_BYTES = 32768
# Colours and cursor movements, and control characters other than tabs.
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


def lock(topology: local_cluster.LocalCluster) -> IO[bytes]:
    """Makes sure that no other launcher is at work in the same directory.

    Returns:
        A file to be kept open; closing it, or dying, gives up the lock.

    Raises:
        ValueError: If another launcher has it, or nothing can be written.
    """
    path = topology.logs_dir / "launcher.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    except OSError as cause:
        raise ValueError(
            "`workdir` must be a directory that can be written to; received "
            f"{topology.workdir!r}: {cause.strerror}. Choose another."
        ) from cause
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(
            "`workdir` must not be in use by another launcher; received "
            f"{topology.workdir!r}. Wait for that run, stop it, or choose "
            "another directory."
        ) from None
    return file


def ensure_key(
    topology: local_cluster.LocalCluster, environ: Mapping[str, str]
) -> None:
    """Makes the key of the run, unless the tasks will inherit one.

    Args:
        topology: What is launched.
        environ: The launcher's own environment.

    Raises:
        ValueError: The key that there is cannot be used.
    """
    if signing.has_key(environ):
        signing.signer_for("environment", environ)
    else:
        signing.make_file(topology.key_path)


def make_room(topology: local_cluster.LocalCluster) -> list[str]:
    """Renames the files of an earlier run; returns the new names."""
    ready_dir = topology.logs_dir / "ready"
    if ready_dir.exists():
        shutil.rmtree(ready_dir)
    ready_dir.mkdir()
    logs = topology.logs_dir.glob("group_*_*_*.log")
    old = [path for path in logs if len(path.suffixes) == 1]
    record = _record_path(topology)
    old += [record] if record.exists() else []
    number = 1
    while any(_numbered(path, number).exists() for path in old):
        number += 1
    return [str(path.rename(_numbered(path, number))) for path in sorted(old)]


def _numbered(path: pathlib.Path, number: int) -> pathlib.Path:
    return path.with_suffix(f".{number}{path.suffix}")


def _record_path(topology: local_cluster.LocalCluster) -> pathlib.Path:
    return pathlib.Path(topology.workdir, "launch.json")


def write_record(
    topology: local_cluster.LocalCluster,
    *,
    started: float,
    pids: Mapping[str, int],
) -> None:
    """Writes launch.json: what was launched, when, and as which processes.

    Args:
        topology: What was launched.
        started: When, in seconds since 1970.
        pids: The process id of each task, by name.
    """
    record = {
        "format": 1,
        "started": started,
        "topology": dataclasses.asdict(topology),
        "pids": dict(pids),
    }
    path = _record_path(topology)
    draft = path.with_suffix(".json.tmp")
    draft.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    draft.replace(path)


def last_lines(path: pathlib.Path) -> list[str]:
    """Returns the last lines of a log, at most twenty, as plain text.

    Of a line that was overwritten in place, as progress bars are, only what
    was visible in the end is returned.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        text = file.read().decode("utf-8", errors="replace")
    lines = text.replace("\r\n", "\n").rstrip("\n").split("\n")
    shown = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
    return [_CONTROL.sub("", line) for line in shown][-_NUM_LAST_LINES:]
