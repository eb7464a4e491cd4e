"""The parent of a run's tasks: one import of TensorFlow for all of them.

To import TensorFlow and Keras takes seconds, and much of each task's memory. A
process that has imported them, and run nothing, may be forked. So a launcher
keeps one such process, and a task that runs a Python command is a fork of it,
started within milliseconds, however often it is started again. What the task
sees of its start is what `python` would have shown it
(preloaded/sitecustomize.py); what a fork cannot give, a new program does.

The parent is of no use to a task that runs: it may die or hang at any time. A
task that it has not started by then is started as a new program, and the next
one by a new parent.
"""

import collections
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

from tfdistill.system import processes

# How tasks are started, and by default what their parent imports.
FORK, SPAWN = "fork", "spawn"
METHODS = (FORK, SPAWN)
PRELOAD = ("tensorflow", "keras", "tfdistill")
_HOOK = pathlib.Path(__file__).with_name("preloaded")
_VARIABLE = "TFDISTILL_PARENT"
# Variables that may differ between a parent and its tasks: nothing that is
# imported reads them.
_OF_A_TASK = re.compile(r"TF_CONFIG|(TFDISTILL|WANDB|COMET|MLFLOW)_\w+")
_IMPORT_SECS = 120.0
_STOPPED = ("T", "t")
# One that dies on the way to its first task is tried again this often.
_MOST_FAILURES = 2
# Parents that are kept at a time, for commands that differ.
_MOST_PARENTS = 2
# As of setrlimit(2).
_LIMITS = {v for k, v in vars(resource).items() if k.startswith("RLIMIT_")}
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_FLAGS = re.compile(r"-[uBObq]+")
_FLAGS_WITH_VALUE = ("-W", "-X")


@dataclasses.dataclass(frozen=True)
class PythonCommand:
    """What a command runs by Python; its arguments are not in it.

    Attributes:
        words: The interpreter, its options and what is run.
        num_options: Words before what is run, the interpreter's among them.
        script: The path of what is run; None for `-m` and `-c`.
    """

    words: tuple[str, ...]
    num_options: int
    script: str | None

    @classmethod
    def parse(cls, command: Sequence[str]) -> "PythonCommand | None":
        """Takes a command apart; None if it runs nothing by Python.

        None, too, if there are options of the interpreter which a parent
        cannot be sure to share.
        """
        if not _PYTHON.fullmatch(os.path.basename(command[0])):
            return None
        at = 1
        while at < len(command) and command[at].startswith("-"):
            word = command[at]
            if word in ("-m", "-c") and at + 1 < len(command):
                return cls(tuple(command[: at + 2]), at, None)
            if word in _FLAGS_WITH_VALUE:
                at += 2
            elif word.startswith(_FLAGS_WITH_VALUE) or _FLAGS.fullmatch(word):
                at += 1
            else:
                return None
        if at >= len(command):
            return None
        return cls(tuple(command[: at + 1]), at, command[at])


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
        failure: Why it can start no task any more, in words; empty if it can.
    """

    def __init__(
        self,
        program: PythonCommand,
        *,
        env: Mapping[str, str],
        preload: Sequence[str],
        news: "list[News]",
    ) -> None:
        """Starts it, without waiting for its imports; adds to `news`."""
        self.is_ready = False
        self.failure = ""
        self._preload = tuple(preload)
        self._news = news
        self._started = time.monotonic()
        self._socket, theirs = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET
        )
        self._socket.setblocking(False)
        script = program.script
        plan = {
            "checked": False,
            "command": program.words,
            "dies_with": os.getpid(),
            "fd": theirs.fileno(),
            "path": os.path.dirname(os.path.realpath(script))
            if script
            else os.getcwd(),
            "preload": self._preload,
            "pythonpath": env.get("PYTHONPATH"),
            "script": script,
        }
        paths = [str(_HOOK), *filter(None, [env.get("PYTHONPATH")])]
        own = {
            "PYTHONPATH": os.pathsep.join(paths),
            _VARIABLE: json.dumps(plan),
        }
        # An interpreter that does not load the hook ends right here, and the
        # command is never run.
        refuse = "raise SystemExit('sitecustomize.py was not loaded')"
        self._output = _file_in_memory()
        with contextlib.ExitStack() as at_failure, theirs:
            at_failure.enter_context(self._socket)
            at_failure.enter_context(self._output)
            self._process = subprocess.Popen(
                [*program.words[: program.num_options], "-c", refuse],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env={**shared(env), **own},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
            at_failure.pop_all()
        self.pid = self._process.pid

    def fileno(self) -> int:
        """Returns the descriptor that becomes readable on news."""
        return self._socket.fileno()

    def read(self) -> None:
        """Takes in whether it is ready, or is no more."""
        if self.failure:
            return
        try:
            data = self._socket.recv(65536)
        except BlockingIOError:
            self._look()
            return
        except ConnectionResetError:
            data = b""
        if not data:
            code = self._process.wait()
            self._fail(f"it ended with {code}: {self._last_line()}")
            return
        hello = json.loads(data)
        if hello["unfit"]:
            self._fail(hello["unfit"])
            return
        self.is_ready = True
        secs = time.monotonic() - self._started
        missing = hello["missing"]
        names = [name for name in self._preload if name not in missing]
        text = (
            f"tasks are forks of process {self.pid}, which has imported "
            f"{', '.join(names) or 'nothing'} in {secs:.1f} s"
        )
        if missing:
            text += f"; there is no {', no '.join(missing)}"
        self._news.append((text, {"pid": self.pid, "ready_secs": secs}))

    def _look(self) -> None:
        """Gives up one that will not answer."""
        found = processes.status_of(self.pid)
        if found is not None and found.state in _STOPPED:
            self._fail("it was stopped")
        elif not self.is_ready:
            if time.monotonic() - self._started > _IMPORT_SECS:
                self._fail(f"its imports took more than {_IMPORT_SECS:g} s")

    def fork(
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
        with contextlib.suppress(OSError):  # Nothing comes of it, either.
            ask(
                self._socket,
                command,
                env=env,
                log_fd=log_fd,
                keeper_fd=keeper_fd,
            )

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
        self._socket.close()
        self._output.close()


# In words, and as the details of an event; see `run_events`.
News = tuple[str, dict[str, Any]]


def ask(
    control: socket.socket,
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    log_fd: int,
    keeper_fd: int,
) -> None:
    """Asks, as `Parent.fork` does, by the launcher's end of a parent's socket.

    The task gets from this process what a program that it starts would get.
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
        self._failures: collections.Counter[object] = collections.Counter()
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
        of_all = frozenset(shared(env).items())
        try:
            directory = os.getcwd()
        except FileNotFoundError:  # It was removed.
            return None
        key = (program.words, directory, of_all, tuple(preload))
        found = self._parents.pop(key, None)
        if found is not None:
            found.read()
            if found.failure:
                self._failures[key] += not found.is_ready
                found.close()
                found = None
        if found is None:
            if self._failures[key] >= _MOST_FAILURES:
                return None
            while len(self._parents) >= _MOST_PARENTS:
                self._parents.pop(next(iter(self._parents))).close()
            try:
                found = Parent(
                    program, env=env, preload=preload, news=self._news
                )
            except OSError as error:
                self._failures[key] = _MOST_FAILURES
                text = f"warning: no process can be made to fork tasks: {error}"
                self._news.append((text, {"failure": str(error)}))
                return None
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
