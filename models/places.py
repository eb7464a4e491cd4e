"""Where data sets lie, and where converted forms are made, once.

On one machine one process makes it and the others wait. Where locks do not
reach, as on some shared file systems, several may make it; the first rename
wins, and all of them use that one.
"""

import collections
import contextlib
import fcntl
import os
import pathlib
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

__all__ = ["cache_dir", "check_names", "data_dir", "made_once", "natural_order"]


Path = str | os.PathLike[str]


def data_dir(given: Path | None = None) -> pathlib.Path:
    """Returns `given`, else TFDISTILL_DATA, else `../shared/data`."""
    if given is not None:
        return pathlib.Path(given)
    if os.environ.get("TFDISTILL_DATA"):
        return pathlib.Path(os.environ["TFDISTILL_DATA"])
    repository = pathlib.Path(__file__).resolve().parents[1]
    return repository.parent / "shared" / "data"


def cache_dir(given: Path | None = None) -> pathlib.Path:
    """Returns `given`, else `tfdistill` in the user's cache directory."""
    if given is not None:
        return pathlib.Path(given)
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(home) / "tfdistill"


def natural_order(path: pathlib.Path) -> list[tuple[int, int, str]]:
    """Returns a key to sort by: day_9 comes before day_10."""
    parts = re.split(r"([0-9]+)", str(path))
    return [
        (1, int(part), "") if part.isdecimal() else (0, 0, part)
        for part in parts
    ]


def check_names(names: Sequence[Any]) -> None:
    """Checks the files that a user's `path` stands for.

    Args:
        names: One for each file.

    Raises:
        ValueError: If there is none, or one comes twice.
    """
    if not names:
        raise ValueError("`path` must name at least one file; received none.")
    twice = [
        n for n, number in collections.Counter(names).items() if number > 1
    ]
    if twice:
        raise ValueError(
            f"`path` must name each file once; received {twice[0]} twice. "
            "Remove one of the two."
        )


_POLL_SECS = 0.2
_TELL_EVERY_SECS = 30.0
_WAIT_SECS = 4 * 3600.0


def made_once(
    final: pathlib.Path,
    make: Callable[[pathlib.Path], None],
    *,
    wait_secs: float = _WAIT_SECS,
) -> pathlib.Path:
    """Returns a directory that is whole: made before, by others, or now.

    Args:
        final: The directory.
        make: Fills an empty directory. If it fails, nothing remains.
        wait_secs: How long to wait for another process that makes it.
            Default 4 hours.

    Returns:
        `final`.

    Raises:
        RuntimeError: If another process takes too long.
    """
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with _lock(final.with_name(f".lock-{final.name}"), wait_secs) as is_alone:
        if final.is_dir():
            return final
        if is_alone:
            _remove_leftovers(final)
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
    return final


def _prefix(final: pathlib.Path) -> str:
    # With the machine's name: what others are making is not ours to remove.
    return f".tmp-{final.name}-{os.uname().nodename}-"


def _remove_leftovers(final: pathlib.Path) -> None:
    """Removes what a process of this machine left when it was killed."""
    for path in final.parent.glob(f"{_prefix(final)}*"):
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _lock(path: pathlib.Path, wait_secs: float) -> Iterator[bool]:
    """Holds a lock, if there are any; a process that dies lets go of it."""
    with path.open("a+") as opened:
        # The file stays, since those who wait hold it open; closing unlocks.
        yield _wait(opened.fileno(), path, wait_secs)


def _wait(descriptor: int, path: pathlib.Path, wait_secs: float) -> bool:
    start = told = time.monotonic()
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            pass
        except OSError:
            # No locks here: then all make it, and the first rename wins.
            return False
        now = time.monotonic()
        if now - start >= wait_secs:
            raise RuntimeError(
                f"Another process has been converting data for over "
                f"{wait_secs:.0f} s; it holds {path}. See whether it still "
                "makes progress; once it ends, start again."
            )
        if now - told >= _TELL_EVERY_SECS:
            told = now
            print(
                f"Data: waiting for another process to convert them "
                f"({now - start:.0f} s so far; {path}) ...",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(min(_POLL_SECS, wait_secs))
