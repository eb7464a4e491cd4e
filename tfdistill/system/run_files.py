"""The files of a run: what they are called, and how one appears whole."""

import contextlib
import fcntl
import json
import os
import pathlib
import re
import shutil
import time
from collections.abc import Iterable
from collections.abc import Mapping
from typing import IO
from typing import Any

# What the chief of a group logs, in the group's directory.
METRICS = "metrics.jsonl"
# In the workdir: the recipe, if a run is of one, and what the run came to.
CONFIG = "config.json"
RESULTS = "results.json"
# Where its attempts to train began, and when they came to new steps.
MARKS = "attempts.jsonl"
# In a version that was promoted: the student, and the last backup of its
# training. TensorFlow leaves this directory of a SavedModel alone.
EXTRA = "assets.extra"
STUDENT = f"{EXTRA}/student.keras"
TRAINING = f"{EXTRA}/training"
# Where runs without a directory go, and the link to the newest of them. It lies
# beside them: `tensorboard --logdir runs` would follow it, and show that twice.
RUNS, LAST = "runs", "last_run"
# The key that a launch's groups sign their versions with.
KEY = "exchange.key"

# Between two looks at a lock.
_LOOK_SECS = 0.02
_GROUP = re.compile(r"group_(0|[1-9][0-9]{0,5})")


def group_name(group: int) -> str:
    """Returns what the directories of a group are called, and the group itself.

    Example:
        >>> group_name(3), group_of(group_name(3)), group_of("group_03")
        ('group_3', 3, None)
    """
    return f"group_{group}"


def group_of(name: str) -> int | None:
    """Returns the index of the group of that name; None if none has it."""
    match = _GROUP.fullmatch(name)
    return int(match[1]) if match else None


def real(path: str | os.PathLike[str]) -> str:
    """Returns the one name of a place, which may have many; a URL as it is.

    Example:
        >>> real("gs://bucket/run"), real("/./tmp") == real("/tmp")
        ('gs://bucket/run', True)
    """
    name = os.fspath(path)
    return name if "://" in name else os.path.realpath(name)


def write(path: str | os.PathLike[str], blocks: Iterable[bytes]) -> None:
    """Writes a file that appears whole and durable, or leaves the old one.

    Its directory must exist.
    """
    path = os.fspath(path)
    draft = f"{path}.{os.getpid()}.part"
    try:
        with open(draft, "wb") as file:
            file.writelines(blocks)
            _flush(file)
        try:
            os.replace(draft, path)
        except OSError:
            # Some mounts rename nothing; what is wrong otherwise, such as a
            # directory in the file's place, fails here again.
            with open(draft, "rb") as source, open(path, "wb") as file:
                shutil.copyfileobj(source, file)
                _flush(file)
    finally:
        with contextlib.suppress(OSError):
            os.remove(draft)


def locked(
    path: str | os.PathLike[str], *, wait_secs: float = 0.0
) -> IO[bytes]:
    """Opens a file that one process at a time may hold, on this machine.

    Closing it gives it up, and so does the end of the process and of those
    forked meanwhile. Its directory must exist.

    Raises:
        BlockingIOError: Another process has it, still after `wait_secs`.
        OSError: It cannot be written.
    """
    deadline = time.monotonic() + wait_secs
    file = open(path, "a+b", buffering=0)
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() >= deadline:
                file.close()
                raise
        time.sleep(_LOOK_SECS)


class LineFile:
    """A file that grows by lines of JSON; one that does not fit is lost.

    These lines are optional: a full disk doesn't stop training.

    Attributes:
        error: Why the last line could not be written; None if it was.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.error: OSError | None = None
        self._path = path

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds a line, whole and at once."""
        # After a failure a part of a line may stand there.
        text = "\n" * (self.error is not None) + json.dumps(record) + "\n"
        try:
            with self._path.open("ab") as file:
                file.write(text.encode())
            self.error = None
        except OSError as error:
            self.error = error


def _flush(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
