"""The parent of a run's tasks: one import of TensorFlow for all of them.

To import TensorFlow and Keras takes seconds, and much of each task's memory. A
process that has imported them, and run nothing, may be forked. So a launcher
keeps one such process (fork_server.py), and a task that runs a Python command
is a fork of it, started within milliseconds, however often it is started again.

The parent is of no use to a task that runs: it may die or hang at any time. A
task that it has not started by then is started as a new program, and the next
one by a new parent.
"""

import contextlib
import dataclasses
import glob
import json
import os
import pathlib
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import IO
from typing import Any

# How tasks are started, and by default what their parent imports.
FORK, SPAWN = "fork", "spawn"
METHODS = (FORK, SPAWN)
PRELOAD = ("tensorflow", "keras", "tfdistill")
_SERVER = str(pathlib.Path(__file__).with_name("fork_server.py"))
# Variables that may differ between a parent and its tasks: nothing that is
# imported reads them.
_OF_A_TASK = re.compile(r"TF_CONFIG|(TFDISTILL|WANDB|COMET|MLFLOW)_\w+")
# A parent that takes longer hangs: with its imports, and with one fork.
_IMPORT_SECS, _FORK_SECS = 120.0, 30.0
# Parents that are kept at a time, for commands that differ.
_MOST_PARENTS = 2
# As of setrlimit(2).
_LIMITS = {v for k, v in vars(resource).items() if k.startswith("RLIMIT_")}
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_FLAGS = re.compile(r"-[uBObq]+")
# In words, and as the details of an event; see `run_events`.
News = tuple[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class PythonCommand:
    """What a command runs by Python; its arguments are not in it.

    Attributes:
        words: The interpreter, its options and what is run.
        num_options: Words before what is run, the interpreter's among them.
    """

    words: tuple[str, ...]
    num_options: int

    @classmethod
    def parse(cls, command: Sequence[str]) -> "PythonCommand | None":
        """Takes a command apart; None if a parent cannot run it.

        That is what is no call of Python, has options which a parent cannot be
        sure to share, or is a script that is not there or no SCRIPT.py.
        """
        if not _PYTHON.fullmatch(os.path.basename(command[0])):
            return None
        at = 1
        while at < len(command) and _FLAGS.fullmatch(command[at]):
            at += 1
        what = list(command[at : at + 2])
        if what[:1] not in (["-m"], ["-c"]):
            what = what[:1]
            if not what or not what[0].endswith(".py"):
                return None
            if not os.path.isfile(what[0]):
                return None  # Python itself says so, and ends with 2.
        elif len(what) < 2:
            return None
        return cls((*command[:at], *what), at)

    @property
    def path(self) -> str:
        """The directory from which it imports first."""
        what = self.words[self.num_options]
        if what in ("-m", "-c"):
            return os.getcwd()
        return os.path.dirname(os.path.realpath(what))


def why_not(
    method: str, command: Sequence[str], environ: Mapping[str, str]
) -> str | None:
    """Returns why a command is not started by a fork; None if it is."""
    if method == SPAWN:
        return f"--start={SPAWN}"
    if sys.platform != "linux":
        return f"this system is {sys.platform}, not Linux"
    if PythonCommand.parse(command) is None:
        return "the command is no plain call of Python"
    hidden = environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    # NVIDIA's, AMD's, and those of a Windows machine.
    gpus = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg")
    if any(map(glob.glob, gpus)) and not hidden:
        return "a GPU is visible, and who has opened one cannot be forked"
    return None


class Parent:
    """The launcher's handle of one parent.

    Attributes:
        pid: Its process id.
        is_ready: Whether it has imported what it was to import.
        control: The launcher's end of its socket, for `ask`.
        failure: Why it can start no task any more, in words; empty if it can.
    """

    def __init__(
        self,
        program: PythonCommand,
        *,
        env: Mapping[str, str],
        preload: Sequence[str],
        news: list[News],
    ) -> None:
        """Starts it, without waiting for its imports; adds to `news`."""
        self.is_ready = False
        self.failure = ""
        self._preload = tuple(preload)
        self._news = news
        self._started = time.monotonic()
        self.control, theirs = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET
        )
        self.control.setblocking(False)
        plan = {
            "dies_with": os.getpid(),
            "num_options": program.num_options,
            "own": _OF_A_TASK.pattern,
            "path": program.path,
            "preload": self._preload,
        }
        options = program.words[: program.num_options]
        # What is run stands there for `ps`.
        shown = program.words[program.num_options :]
        self._output = _file_in_memory()
        with contextlib.ExitStack() as at_failure, theirs:
            at_failure.enter_context(self.control)
            at_failure.enter_context(self._output)
            # Before it starts: it may end before it reads.
            self.control.send(json.dumps(plan).encode())
            self._process = subprocess.Popen(
                [*options, _SERVER, str(theirs.fileno()), *shown],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env=shared(env),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
            at_failure.pop_all()
        self.pid = self._process.pid

    def fileno(self) -> int:
        """Returns the descriptor that becomes readable on news."""
        return self.control.fileno()

    def read(self, *, asked: float | None = None) -> None:
        """Takes in whether it is ready, or is no more.

        It is given up, too, if it hangs: over its imports, or over a task that
        it was `asked` for then (`time.monotonic()`).
        """
        if self.failure:
            return
        try:
            data = self.control.recv(65536)
        except BlockingIOError:
            self._look(asked)
            return
        except ConnectionResetError:
            data = b""
        if not data:
            code = self._process.wait()
            self._fail(f"it ended with {code}: {self._last_line()}")
            return
        self.is_ready = True
        secs = time.monotonic() - self._started
        self._started = time.monotonic()
        text = (
            f"tasks are forks of process {self.pid}, which has imported "
            f"{', '.join(self._preload)} in {secs:.1f} s"
        )
        self._news.append((text, {"pid": self.pid, "ready_secs": secs}))

    def _look(self, asked: float | None) -> None:
        now = time.monotonic()
        if not self.is_ready:
            if now - self._started > _IMPORT_SECS:
                self._fail(f"its imports took more than {_IMPORT_SECS:g} s")
        elif asked and now - max(asked, self._started) > _FORK_SECS:
            self._fail(f"it has started no task for {_FORK_SECS:g} s")

    def _fail(self, why: str) -> None:
        self.failure = why
        self._process.kill()
        self._process.wait()
        text = (
            f"warning: process {self.pid} forks no more tasks, as {why}; "
            "those that run are not affected"
        )
        self._news.append((text, {"pid": self.pid, "failure": why}))

    def _last_line(self) -> str:
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").splitlines()
        return lines[-1] if lines else "no message"

    def close(self) -> None:
        """Ends it; its tasks run on."""
        self._process.kill()
        self._process.wait()
        self.control.close()
        self._output.close()


def ask(
    control: socket.socket,
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    log_fd: int,
    keeper_fd: int,
) -> None:
    """Asks a parent for a task, which starts after the imports.

    The task gets from this process what a program that it starts would get. A
    keeper with that end of a socket pair reports it. If the parent fails first,
    nothing comes of it, and that end is closed.
    """
    mask = os.umask(0o077)
    os.umask(mask)
    request = {
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "command": command,
        "cores": sorted(os.sched_getaffinity(0)),
        "environ": dict(env),
        "limits": [(n, resource.getrlimit(n)) for n in sorted(_LIMITS)],
        "umask": mask,
    }
    with _file_in_memory() as file:
        file.write(json.dumps(request).encode())
        file.seek(0)
        fds = [file.fileno(), keeper_fd, log_fd]
        with contextlib.suppress(OSError):  # Nothing comes of it, either.
            socket.send_fds(control, [b"fork"], fds)


def _file_in_memory() -> IO[bytes]:
    """Returns a file that a full disk does not concern."""
    return open(os.memfd_create("tfdistill"), mode="w+b")


def shared(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that a parent has, and its tasks alike."""
    return {k: v for k, v in env.items() if not _OF_A_TASK.fullmatch(k)}


class Parents:
    """Parents by what they have in common with their tasks.

    Commands that differ only in their program's arguments, and in variables
    that name a task, share one.
    """

    def __init__(self) -> None:
        """Starts nothing yet."""
        self._parents: dict[object, Parent] = {}
        # By the same keys, what has never become ready.
        self._hopeless: set[object] = set()
        self._news: list[News] = []

    def of(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        preload: Sequence[str] = PRELOAD,
    ) -> Parent | None:
        """Returns who can fork a task, now or soon; None: start a program."""
        program = PythonCommand.parse(command)
        if program is None:
            return None
        variables = frozenset(shared(env).items())
        key = (program.words, os.getcwd(), variables, tuple(preload))
        found = self._parents.pop(key, None)
        if found is not None:
            found.read()
            if found.failure:
                if not found.is_ready:
                    self._hopeless.add(key)
                found.close()
                found = None
        if key in self._hopeless:
            return None
        if found is None:
            while len(self._parents) >= _MOST_PARENTS:
                self._parents.pop(next(iter(self._parents))).close()
            found = Parent(program, env=env, preload=preload, news=self._news)
        self._parents[key] = found  # The last one used is the last to go.
        return found

    def news(self) -> list[News]:
        """Returns, once for each, who has become ready or has failed."""
        for parent in self._parents.values():
            parent.read()
        found = self._news[:]
        self._news.clear()
        return found

    def close(self) -> None:
        """Ends all parents; tasks run on."""
        for parent in self._parents.values():
            parent.close()
        self._parents.clear()


class _Kept(threading.local):
    """The parents of the outermost `keep` in progress.

    Of this thread: the kernel ends a parent with the thread that started it.
    """

    parents: Parents | None = None


_kept = _Kept()


@contextlib.contextmanager
def keep() -> Iterator[Parents]:
    """Keeps parents until the end of the outermost such context.

    A run does so for its restarts; around several runs it serves them all.
    """
    if _kept.parents is not None:
        yield _kept.parents
        return
    _kept.parents = parents = Parents()
    try:
        yield parents
    finally:
        _kept.parents = None
        parents.close()
