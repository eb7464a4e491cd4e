"""What a task tells its launcher: that it starts, its progress, why it ends.

A task creates two files beside its log: one when it begins to wait for the
other tasks of its group and one when they are all connected; and a third if it
cannot listen on its address. A fourth holds its progress in one line: its
phase, and how often it has reported. The line is overwritten in place, without
ever waiting for the disk (half a microsecond a time on Linux), and the launcher
judges by its own clock when it last saw the line change. So a task that hangs
is found even if it holds Python's lock, or if its threads are all gone.

The names of the files come from `TFDISTILL_READY_FILE`; without it (another
launcher) nothing is written.
"""

import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Iterator
from collections.abc import Mapping

# Exit code of a task that failed for a reason that may be gone at another try:
# another task did not come or was lost, or it was stopped.
EXIT_RETRY = 75
VARIABLE = "TFDISTILL_READY_FILE"
# What a task may say once: that it is there and waits for its group; that all
# tasks of the group are connected; that another process has its address.
STARTING, READY, PORT_TAKEN = ".starting", "", ".port_taken"
_PROGRESS = ".progress"
SUFFIXES = (READY, STARTING, PORT_TAKEN, _PROGRESS)


def announce(sign: str) -> None:
    """Reports one of the signs above for this task."""
    if path := os.environ.get(VARIABLE):
        pathlib.Path(path + sign).touch()


def found(ready_path: pathlib.Path, sign: str) -> bool:
    """Whether the task with this ready file has said so."""
    return ready_path.with_name(ready_path.name + sign).exists()


_LINE_BYTES = 64

# What a task is at. From the step before to the next:
STEP = "step"
EVALUATION_STEP = "evaluation step"
PREDICTION_STEP = "prediction step"
# To the first step, with what TensorFlow traces and what the data prepare:
FIRST_STEP = "first step of an epoch"
FIRST_EVALUATION_STEP = "first step of an evaluation"
FIRST_PREDICTION_STEP = "first step of a prediction"
# To the first steps of a graph of more, or fewer, in the midst of training:
NEW_GRAPH = "first steps of a new graph"
# In code of the user's, which may take any time:
CALLBACKS = "callbacks"
EPOCH_END = "end of an epoch"
# In a worker or ps that serves its chief:
SERVING = "serving"
# Not in the library's hands:
IDLE = "idle"


@dataclasses.dataclass(frozen=True)
class Line:
    """What a task last said: its phase, and how often it has said something."""

    phase: str
    count: int


class Reporter:
    """Writes one task's progress."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        path = environ.get(VARIABLE)
        self._path = path + _PROGRESS if path else None
        self._fd: int | None = None
        self._count = 0
        self._phase = IDLE

    @property
    def is_heard(self) -> bool:
        """Whether anybody listens."""
        return self._path is not None

    @contextlib.contextmanager
    def returning(self) -> Iterator[None]:
        """Goes back, in the end, to what the task is at now."""
        phase = self._phase
        try:
            yield
        finally:
            self.say(phase)

    def say(self, phase: str) -> None:
        """Reports that there was progress, and the task's present phase."""
        if self._path is None:
            return
        self._count += 1
        self._phase = phase
        line = f"{self._count} {phase}".ljust(_LINE_BYTES - 1) + "\n"
        try:
            if self._fd is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
                self._fd = os.open(self._path, flags, 0o644)
            os.pwrite(self._fd, line.encode(), 0)
        except OSError:
            # Or it would look like a task that hangs.
            pathlib.Path(self._path).unlink(missing_ok=True)
            self._path = None


def read_progress(ready_path: pathlib.Path) -> Line | None:
    """Returns what a task last said; None if it has said nothing."""
    try:
        text = pathlib.Path(f"{ready_path}{_PROGRESS}").read_text("utf-8")
        count, _, phase = text.strip().partition(" ")
        return Line(phase, int(count))
    except (OSError, ValueError):
        return None


@functools.cache
def own() -> Reporter:
    """Returns this process's one reporter."""
    return Reporter()
