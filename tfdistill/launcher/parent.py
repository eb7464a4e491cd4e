"""The parent of a run's tasks: one import of TensorFlow for all of them.

To import TensorFlow and Keras takes seconds, and much of each task's memory. A
process that has imported them, and run nothing, may be forked. So a launcher
keeps one such process (fork_server.py), and a task that runs a Python command
is a fork of it, started within milliseconds, however often it is started again.

The parent is of no use to a task that runs: it may die or hang at any time.
What it has not started by then, and all that comes later, is started as a new
program.
"""

import contextlib
import glob
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import IO

# How tasks are started, and by default what their parent imports.
FORK, SPAWN = "fork", "spawn"
METHODS = (FORK, SPAWN)
PRELOAD = ("tensorflow", "keras", "tfdistill")
# A parent that takes longer hangs: for its imports, or for a fork after them.
LIMIT_SECS = 120.0
_SERVER = str(pathlib.Path(__file__).with_name("fork_server.py"))
# Variables that may differ between a parent and its tasks: nothing that is
# imported reads them.
_OF_A_TASK = re.compile(
    r"TF_CONFIG|GRPC_FAIL_FAST|(TFDISTILL|WANDB|COMET|MLFLOW)_\w+"
)
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_FLAGS = re.compile(r"-[uBObq]+")
# The interpreter with its options, and what it runs.
_Program = tuple[tuple[str, ...], tuple[str, ...]]


def _parse(command: Sequence[str]) -> _Program | None:
    """Takes a command apart, without its arguments; None if it is not forked.

    A command is not forked if it isn't a call of Python, has options which a
    parent cannot be sure to share, or names a script that is missing or isn't
    a .py file.
    """
    if not _PYTHON.fullmatch(os.path.basename(command[0])):
        return None
    at = 1
    while at < len(command) and _FLAGS.fullmatch(command[at]):
        at += 1
    options, what = tuple(command[:at]), tuple(command[at : at + 2])
    if what[:1] not in (("-m",), ("-c",)):
        what = what[:1]
        # Python itself says that a script is not there, and ends with 2.
        if not what or not what[0].endswith(".py") or not os.path.isfile(*what):
            return None
    return options, what


def why_not(
    method: str, command: Sequence[str], environ: Mapping[str, str]
) -> str | None:
    """Returns why a command is not started by a fork; None if it is."""
    if method == SPAWN:
        return f"--start={SPAWN}"
    if sys.platform != "linux":
        return f"this system is {sys.platform}, not Linux"
    if _parse(command) is None:
        return "the command isn't a plain call of Python"
    hidden = environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    # NVIDIA's, AMD's, and a Windows machine's.
    gpus = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg")
    if any(map(glob.glob, gpus)) and not hidden:
        return (
            "a GPU is visible, and a process that has opened a GPU can't be "
            "forked"
        )
    return None


class Parent:
    """The launcher's handle of one parent.

    Attributes:
        pid: Its process id.
        key: What it has in common with the tasks that it forks.
    """

    def __init__(
        self,
        program: _Program,
        *,
        env: Mapping[str, str],
        preload: Sequence[str],
        key: object,
    ) -> None:
        """Starts it, without waiting for its imports."""
        options, what = program
        self.key = key
        self._why = ""
        self._num_options = len(options)
        self._control, theirs = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET
        )
        self._control.setblocking(False)
        # A file that a full disk does not concern.
        self._output: IO[bytes] = open(os.memfd_create("parent"), mode="w+b")
        imports = [str(theirs.fileno()), ",".join(preload)]
        with theirs:
            self._process = subprocess.Popen(
                [*options, _SERVER, *imports, *what],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env=_shared(env),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.pid = self._process.pid

    @property
    def failure(self) -> str:
        """Why it can no longer start tasks, in words; empty if it can."""
        code = self._process.poll()
        if code is None or self._why:
            return self._why
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").splitlines()
        return f"it ended with {code}: {(lines or ['no message'])[-1]}"

    def ask(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        log_fd: int,
        keeper_fd: int,
    ) -> None:
        """Asks for a task, which starts after the imports.

        A keeper with that end of a socket pair reports it. If the parent fails
        first, nothing comes of it, and that end is closed.
        """
        own = {k: v for k, v in env.items() if _OF_A_TASK.fullmatch(k)}
        request = {
            "argv": command[self._num_options :],
            "environ": own,
            "own": _OF_A_TASK.pattern,
        }
        with contextlib.suppress(OSError):  # Nothing comes of it, either.
            socket.send_fds(
                self._control,
                [json.dumps(request).encode()],
                [keeper_fd, log_fd],
            )

    def give_up(self, why: str) -> None:
        """Ends it before it has forked what it was asked for."""
        self._why = why
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Ends it; its tasks run on."""
        self.give_up("it is no longer needed")
        self._control.close()
        self._output.close()


def _shared(env: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in env.items() if not _OF_A_TASK.fullmatch(k)}


class _Kept(threading.local):
    """The parent of the outermost `keep` in progress.

    One per thread: the kernel ends a parent with the thread that started it.
    """

    depth = 0
    parent: Parent | None = None

    def close(self) -> None:
        if self.parent is not None:
            self.parent.close()
        self.parent = None


_kept = _Kept()


@contextlib.contextmanager
def keep() -> Iterator[None]:
    """Keeps the parent that `get` returns until the end of the outermost one.

    A run does so for its restarts; around several runs it serves them all.
    """
    _kept.depth += 1
    try:
        yield
    finally:
        _kept.depth -= 1
        if not _kept.depth:
            _kept.close()


def get(
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    preload: Sequence[str] = PRELOAD,
) -> Parent | None:
    """Returns a parent to fork a task, now or soon; None: start a new program.

    Commands that differ only in their program's arguments, and in variables
    that name a task, share a parent; another one takes its place.
    """
    program = _parse(command)
    if program is None:
        return None
    key = program, os.getcwd(), _shared(env), tuple(preload)
    if _kept.parent is None or _kept.parent.key != key:
        _kept.close()
        _kept.parent = Parent(program, env=env, preload=preload, key=key)
    return None if _kept.parent.failure else _kept.parent
