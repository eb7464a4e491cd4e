"""One task as a process that cannot outlive its launcher.

Each task runs under a keeper: this very file, run as a script that needs
nothing but the standard library. Launcher and keeper hold the two ends of a
socket pair. A byte from the launcher asks the task to end; the end of file,
which the kernel delivers however the launcher dies (SIGKILL too), makes the
keeper kill the task, the task's whole process group and, on Linux, every
process descended from it, even one that moved to a session of its own.

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
import subprocess
import sys
import time
from collections.abc import Mapping
from collections.abc import Sequence
from typing import IO

# Time that processes left behind by an ended task get to end by themselves.
_LINGER_SECS = 1.0
_ON_LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class TaskProcess:
    """The launcher's handle of one task.

    Attributes:
        pid: The task's process id, also that of its process group; None until
            `read` has seen the keeper's first report.
        exit_code: The task's exit code, minus the signal's number if a signal
            ended it; None while it runs.
        exit_time: `time.monotonic()` at that end, taken by the keeper.
        is_stopped: Whether a signal such as SIGSTOP has stopped the task, and
            none has resumed it. A debugger's stops do not count.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        log_file: IO[bytes],
    ) -> None:
        """Starts the task, with no input and all output to one file."""
        self.pid: int | None = None
        self.exit_code: int | None = None
        self.exit_time: float | None = None
        self.is_stopped = False
        self._buffer = b""
        self._socket, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            keeper = [sys.executable, "-I", "-S", __file__, str(fd)]
            self._keeper = subprocess.Popen(
                [*keeper, *command],
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                env=dict(env),
                pass_fds=[fd],
                start_new_session=True,
            )
        self._socket.setblocking(False)

    def fileno(self) -> int:
        """Returns the descriptor that becomes readable on news of the task."""
        return self._socket.fileno()

    @property
    def closed(self) -> bool:
        """Whether nothing is left of the task and its keeper."""
        return self._keeper.returncode is not None

    def read(self) -> None:
        """Takes in the keeper's reports without waiting for them."""
        if self.closed:
            return
        try:
            data = self._socket.recv(4096)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            name, value, stamp = line.split()
            if name == b"pid":
                self.pid = int(value)
            elif name == b"stopped":
                self.is_stopped = value == b"1"
            else:
                self.exit_code, self.exit_time = int(value), float(stamp)
        if not data:
            self._end()

    def request_stop(self) -> None:
        """Sends SIGTERM to the task's process group."""
        if not self.closed:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._socket.send(b"T")

    def hang_up(self) -> None:
        """Has the task and all that it started killed; does not wait."""
        if not self.closed:
            with contextlib.suppress(OSError):  # The keeper is already gone.
                self._socket.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        """Kills the task and all that it started, and waits for the end."""
        self.hang_up()
        deadline = time.monotonic() + 2 * _LINGER_SECS
        while not self.closed and time.monotonic() < deadline:
            select.select([self._socket], [], [], 0.1)
            self.read()
        self._end()

    def _end(self) -> None:
        # The keeper has closed its end: it is about to exit, or was killed.
        if self.closed:
            return
        if self.exit_code is None and self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        try:
            code = self._keeper.wait(timeout=_LINGER_SECS)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            code = self._keeper.wait()
        if self.exit_code is None:
            self.exit_code, self.exit_time = code, time.monotonic()
        self._socket.close()


class _Keeper:
    """Runs in the keeper process: starts one task and sees to its end."""

    def __init__(self, fd: int, command: Sequence[str]) -> None:
        self._launcher = socket.socket(fileno=fd)
        self._launcher.set_inheritable(False)
        self._launcher.setblocking(False)
        self._wakeup, writer = socket.socketpair()
        self._writer = writer
        self._wakeup.setblocking(False)
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in _FORWARDED:
            signal.signal(number, self._forward)
        self._libc = ctypes.CDLL(None) if _ON_LINUX else None
        if self._libc is not None:
            self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._command = list(command)
        self._task = 0
        self._code: int | None = None

    def run(self) -> int:
        own_pid = os.getpid()
        try:
            child = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=lambda: self._die_with(own_pid),
            )
        except OSError as cause:
            print(f"{self._command[0]}: {os.strerror(cause.errno or 0)}")
            code = 127 if cause.errno == errno.ENOENT else 126
            self._report("exit", code)
            return 0
        self._task = child.pid
        self._report("pid", child.pid)
        while self._code is None and self._wait():
            self._reap()
        deadline = time.monotonic() + _LINGER_SECS
        while self._code is not None and time.monotonic() < deadline:
            if not self._left_behind() or not self._wait(0.05):
                break
            self._reap()
        self._kill_all()
        return 0

    def _die_with(self, parent: int) -> None:
        # Between fork and exec of the task.
        if self._libc is None:
            return
        self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

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
        flags = os.WNOHANG | os.WUNTRACED | os.WCONTINUED
        while True:
            try:
                pid, status = os.waitpid(-1, flags)
            except ChildProcessError:
                return
            if not pid:
                return
            if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
                if pid == self._task:
                    self._report("stopped", int(os.WIFSTOPPED(status)))
            elif pid == self._task:
                self._code = os.waitstatus_to_exitcode(status)
                self._report("exit", self._code)

    def _report(self, name: str, value: int) -> None:
        line = f"{name} {value} {time.monotonic()}\n".encode()
        with contextlib.suppress(OSError):  # The launcher may be gone.
            self._launcher.send(line)

    def _left_behind(self) -> list[int]:
        """Returns the living processes that the task has started."""
        if self._libc is not None:
            return _descendants(os.getpid())
        try:
            os.killpg(self._task, 0)
        except (ProcessLookupError, PermissionError):
            return []
        return [-self._task]

    def _kill_all(self) -> None:
        # Repeated: a process may fork between being listed and being killed.
        deadline = time.monotonic() + _LINGER_SECS
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


if __name__ == "__main__":
    sys.exit(_Keeper(int(sys.argv[1]), sys.argv[2:]).run())
