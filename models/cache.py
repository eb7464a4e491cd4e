"""Converted forms of data: made once, kept with a header, checked when opened.

On one machine one process makes a form and the others wait. Where locks do not
reach, as on some shared file systems, several may make it; the first rename
wins, and all of them use that one.
"""

import hashlib
import json
import os
import pathlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import filelock

__all__ = [
    "Progress",
    "check_at_least",
    "check_size",
    "directory",
    "made_once",
    "open_or_make",
    "read_header",
]

_HEADER = "header.json"


def directory(given: str | os.PathLike[str] | None = None) -> pathlib.Path:
    """Returns `given`, else `tfdistill` in the user's cache directory."""
    if given is not None:
        return pathlib.Path(given)
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(home) / "tfdistill"


def open_or_make(
    prefix: str,
    describe: Callable[[], Mapping[str, Any]],
    make: Callable[[pathlib.Path], Mapping[str, Any]],
    *,
    root: pathlib.Path,
) -> pathlib.Path:
    """Returns the directory of a form, which is made at the first call.

    Args:
        prefix: Beginning of the directory's name; its end is a digest.
        describe: Returns, as JSON has it, all that the form depends on. Asked
            again in the end: sources must not change meanwhile.
        make: Fills an empty directory, and returns what the header says
            besides. The header is written last.
        root: Where forms are kept.

    Raises:
        RuntimeError: If the sources change while they are read.
    """
    wanted = describe()
    text = json.dumps(wanted, sort_keys=True)
    key = hashlib.sha256(text.encode()).hexdigest()[:16]

    def make_with_header(aside: pathlib.Path) -> None:
        found = make(aside)
        if describe() != wanted:
            raise RuntimeError(
                f"Files of the {prefix} data changed while they were read. "
                "Start again once they are complete."
            )
        header = json.dumps({**wanted, **found}, indent=1, sort_keys=True)
        (aside / _HEADER).write_text(header, "utf-8")

    return made_once(root / f"{prefix}-{key}", make_with_header)


def read_header(path: pathlib.Path) -> dict[str, Any]:
    """Returns what the header of a form says."""
    return json.loads((path / _HEADER).read_text("utf-8"))


def check_size(path: pathlib.Path, num_bytes: int) -> None:
    """Checks that a file of a form is as long as its header says."""
    if not path.is_file() or path.stat().st_size != num_bytes:
        raise RuntimeError(
            f"{path} must have {num_bytes} bytes; it was damaged after it was "
            f"made. Delete {path.parent}, and start again."
        )


def check_at_least(name: str, value: int, least: int) -> None:
    """Checks that an option is a whole number of at least `least`."""
    if not isinstance(value, int) or value < least:
        raise ValueError(
            f"`{name}` must be a whole number >= {least}; received {value!r}."
        )


class Progress:
    """Reports on standard error how far a long conversion is, now and then."""

    def __init__(self, *, every_secs: float = 10.0) -> None:
        self._every_secs = every_secs
        self._reported = time.monotonic()

    def report(self, text: str) -> None:
        """Prints the text if it is time to."""
        now = time.monotonic()
        if now - self._reported >= self._every_secs:
            self._reported = now
            print(f"{text} ...", file=sys.stderr, flush=True)


def made_once(
    final: pathlib.Path,
    make: Callable[[pathlib.Path], None],
    *,
    wait_secs: float = 4 * 3600.0,
    report_every_secs: float = 30.0,
) -> pathlib.Path:
    """Returns a directory that is whole: made before, by others, or now.

    Args:
        final: The directory.
        make: Fills an empty directory. If it fails, nothing remains.
        wait_secs: How long to wait for another process that makes it.
        report_every_secs: Time between two reports of the wait.

    Raises:
        RuntimeError: If another process takes too long.
    """
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    # The file stays, since those who wait hold it open.
    lock = filelock.FileLock(final.with_name(f".lock-{final.name}"))
    try:
        is_alone = _wait(lock, wait_secs, report_every_secs)
        if not final.is_dir():
            if is_alone:
                _remove_leftovers(final)
            _make_aside(final, make)
    finally:
        lock.release()  # Nothing if it is not held.
    return final


def _make_aside(
    final: pathlib.Path, make: Callable[[pathlib.Path], None]
) -> None:
    aside = pathlib.Path(
        tempfile.mkdtemp(dir=final.parent, prefix=_prefix(final))
    )
    try:
        make(aside)
        # Group mates may run as other users; mkdtemp keeps them out.
        aside.chmod(0o755)
        try:
            aside.rename(final)
        except OSError:
            # Another machine was first: its copy is the same.
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _prefix(final: pathlib.Path) -> str:
    # With the machine's name: what others are making is not ours to remove.
    return f".tmp-{final.name}-{os.uname().nodename}-"


def _remove_leftovers(final: pathlib.Path) -> None:
    """Removes what a process of this machine left when it was killed."""
    for path in final.parent.glob(f"{_prefix(final)}*"):
        shutil.rmtree(path, ignore_errors=True)


def _wait(
    lock: filelock.BaseFileLock, wait_secs: float, report_every_secs: float
) -> bool:
    """Takes the lock; returns False if the file system has none."""
    start = time.monotonic()
    while True:
        waited = time.monotonic() - start
        try:
            lock.acquire(
                timeout=max(0.0, min(report_every_secs, wait_secs - waited)),
                poll_interval=min(0.2, wait_secs),
            )
            return True
        except filelock.Timeout:
            waited = time.monotonic() - start
        except (NotImplementedError, OSError):
            # No locks here: then all make it, and the first rename wins.
            return False
        if waited >= wait_secs:
            raise RuntimeError(
                f"Another process has been converting data for over "
                f"{wait_secs:.0f} s; it holds {lock.lock_file}. See whether "
                "it still makes progress; once it ends, start again."
            )
        print(
            "Data: waiting for another process to convert them "
            f"({waited:.0f} s so far; {lock.lock_file}) ...",
            file=sys.stderr,
            flush=True,
        )
