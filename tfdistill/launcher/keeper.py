"""The process between launcher and task that sees to the task's end.

Each task runs under a keeper, and is a fork of it. A task that is spawned has
this very file as its keeper, run as a script, and becomes its command; one that
is forked has a fork of its parent as its keeper, which has loaded this file: so
it needs nothing but the standard library. Launcher and keeper hold the two ends
of a socket pair. A byte from the launcher asks the task to end; the end of
file, which the kernel delivers however the launcher dies (SIGKILL too), makes
the keeper kill the task, the task's whole process group and, on Linux, every
process descended from it, even one that moved to its own session.

A keeper is used rather than `preexec_fn` in the launcher: that hook may
deadlock if the launcher has threads, and the kernel's parent-death signal
set by it reaches the task only, not what the task has started. In the keeper,
which has one thread, the same signal is safe; it covers the keeper's own death.
"""

import contextlib
import ctypes
import errno
import os
import select
import signal
import socket
import sys
import time
from typing import Literal

# Time that processes left behind by an ended task get to end by themselves.
LINGER_SECS = 1.0
_ON_LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_HANDLED = (*_FORWARDED, signal.SIGCHLD)


def die_with(parent: int) -> None:
    """Makes the kernel kill this process when its parent ends."""
    if _ON_LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


class Keeper:
    """Starts one task, reports what becomes of it, and leaves nothing of it."""

    def __init__(self, fd: int) -> None:
        """Takes over this process; `fd` is its end of the socket pair."""
        self._launcher = socket.socket(fileno=fd)
        self._launcher.set_inheritable(False)
        self._launcher.setblocking(False)
        self._wakeup, self._writer = socket.socketpair()
        self._wakeup.setblocking(False)
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in _FORWARDED:
            signal.signal(number, self._forward)
        if _ON_LINUX:
            libc = ctypes.CDLL(None)
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._task = 0
        self._code: int | None = None

    def start(self) -> Literal["task", "keeper"]:
        """Starts the task as a fork of this process.

        Returns at once in the task, which is as fresh as any new process; and
        in the keeper once nothing is left of the task.
        """
        if not self._wait(0):  # The launcher is gone, or ends it by now.
            return "keeper"
        own_pid = os.getpid()
        # A signal that arrives in between waits until its handler is known.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
        is_ready, says_ready = os.pipe()
        self._task = os.fork()
        if not self._task:
            die_with(own_pid)
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number in _HANDLED:
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for held in (self._launcher, self._wakeup, self._writer):
                held.close()
        os.close(says_ready)
        if self._task:
            os.read(is_ready, 1)  # Its session, which signals are sent to.
        os.close(is_ready)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if not self._task:
            return "task"
        self._report("pid", self._task)
        self._keep()
        return "keeper"

    def _keep(self) -> None:
        while self._code is None and self._wait():
            self._reap()
        deadline = time.monotonic() + LINGER_SECS
        while self._code is not None and time.monotonic() < deadline:
            if not self._left_behind() or not self._wait(0.05):
                break
            self._reap()
        self._kill_all()

    def _forward(self, number: int, frame: object) -> None:
        if self._task and self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._task, number)

    def _wait(self, timeout_secs: float | None = None) -> bool:
        """Returns False once the launcher is gone or wants an end."""
        sockets = [self._launcher, self._wakeup]
        ready, _, _ = select.select(sockets, [], [], timeout_secs)
        if self._wakeup in ready:
            self._wakeup.recv(4096)
        if self._launcher not in ready:
            return True
        try:
            asked = self._launcher.recv(16)
        except ConnectionResetError:
            return False
        if asked:
            self._forward(signal.SIGTERM, None)
        return bool(asked)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid == self._task:
                self._code = os.waitstatus_to_exitcode(status)
                self._report("exit", self._code)

    def _report(self, name: str, value: int) -> None:
        line = f"{name} {value} {time.monotonic()}\n".encode()
        with contextlib.suppress(OSError):  # The launcher may be gone.
            self._launcher.send(line)

    def _left_behind(self) -> list[int]:
        """Returns the living processes that the task has started."""
        if _ON_LINUX:
            return _descendants(os.getpid())
        try:
            os.killpg(self._task, 0)
        except (ProcessLookupError, PermissionError):
            return []
        return [-self._task]

    def _kill_all(self) -> None:
        # Repeated: a process may fork between being listed and being killed.
        deadline = time.monotonic() + LINGER_SECS
        while time.monotonic() < deadline:
            left = self._left_behind()
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            # One with many threads is a zombie before its end can be read.
            if not left and self._code is not None:
                break
            time.sleep(0.01)
            self._reap()
        self._reap()


def _descendants(root: int) -> list[int]:
    """Returns the process ids below `root` that have not yet ended."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # The program's name, in brackets, may itself hold brackets.
                fields = file.read().rpartition(b")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields and fields[0] not in (b"Z", b"X"):
            parents[int(name)] = int(fields[1])
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def _become(command: list[str]) -> None:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them.
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as cause:
        print(f"{command[0]}: {cause.strerror}", flush=True)
        os._exit(127 if cause.errno == errno.ENOENT else 126)


if __name__ == "__main__":
    if Keeper(int(sys.argv[1])).start() == "task":
        _become(sys.argv[2:])
