"""One task as a process that cannot outlive its launcher.

It is a fork of a parent (parent.py) or a new program, under a keeper
(keeper.py) in either case.
"""

import contextlib
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from collections.abc import Sequence
from typing import IO

from tfdistill.launcher import keeper
from tfdistill.launcher import parent as parents

_KEEPER = str(pathlib.Path(keeper.__file__))


class TaskProcess:
    """The launcher's handle of one task.

    Attributes:
        pid: The id of the task's process and of its process group; None until
            `read` has seen the keeper's first report.
        method: `"fork"` or `"spawn"`: how it was, or is to be, started.
        exit_code: The task's exit code, minus the signal's number if a signal
            ended it; None while it runs.
        exit_time: `time.monotonic()` at that end, taken by the keeper.
        closed: Whether nothing is left of the task and its keeper.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        log_file: IO[bytes],
        parent: parents.Parent | None = None,
    ) -> None:
        """Starts the task, with no input and all output to one file.

        A parent starts it after its imports; if that fails, it is started
        without.
        """
        self.pid: int | None = None
        self.exit_code: int | None = None
        self.exit_time: float | None = None
        self.closed = False
        self._command = command
        self._env = env
        self._log_fd = os.dup(log_file.fileno())
        self._buffer = b""
        self._keeper: subprocess.Popen[bytes] | None = None
        # None once it has started the task, or never will.
        self._parent, self._asked = parent, time.monotonic()
        self._start()

    def _start(self) -> None:
        """Asks the parent, or without one starts a keeper with the task."""
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        with theirs:
            if self._parent is not None:
                self.method = parents.FORK
                self._parent.ask(
                    self._command,
                    env=self._env,
                    log_fd=self._log_fd,
                    keeper_fd=theirs.fileno(),
                )
                return
            self.method = parents.SPAWN
            own = [sys.executable, "-I", "-S", _KEEPER, str(theirs.fileno())]
            self._keeper = subprocess.Popen(
                [*own, *self._command],
                stdin=subprocess.DEVNULL,
                stdout=self._log_fd,
                stderr=subprocess.STDOUT,
                env=dict(self._env),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def fileno(self) -> int:
        """Returns the descriptor that becomes readable on news."""
        return self._socket.fileno()

    def read(self) -> None:
        """Takes in the keeper's reports without waiting for them."""
        if self.closed:
            return
        try:
            data = self._socket.recv(4096)
        except BlockingIOError:
            waited = time.monotonic() - self._asked
            if self._parent is not None and waited > parents.LIMIT_SECS:
                # The end of the socket follows.
                self._parent.give_up(f"it hung for {waited:.0f} s")
            return
        except ConnectionResetError:
            data = b""
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            name, value, stamp = line.split()
            if name == b"pid":
                self.pid, self._parent = int(value), None
            else:
                self.exit_code, self.exit_time = int(value), float(stamp)
        if not data:
            self._end()

    def request_stop(self) -> None:
        """Sends SIGTERM to the task's process group."""
        if self._parent is not None:
            self._forget(signal.SIGTERM)
        elif not self.closed:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._socket.send(b"T")

    def hang_up(self) -> None:
        """Kills the task and all that it started; does not wait."""
        if self._parent is not None:
            self._forget(signal.SIGKILL)
        elif not self.closed:
            with contextlib.suppress(OSError):  # The keeper is already gone.
                self._socket.shutdown(socket.SHUT_WR)

    def _forget(self, number: int) -> None:
        """Ends a task that its parent has yet to start, and then will not."""
        self.exit_code, self.exit_time = -number, time.monotonic()
        self._close()

    def kill(self) -> None:
        """Kills the task and all that it started, and waits for the end."""
        self.hang_up()
        deadline = time.monotonic() + 2 * keeper.LINGER_SECS
        while not self.closed and time.monotonic() < deadline:
            select.select([self], [], [], 0.1)
            self.read()
        self._end()

    def _end(self) -> None:
        # The keeper has closed its end: it is about to exit, or was killed.
        if self.closed:
            return
        if self._parent is not None:  # It has failed before this task's turn.
            self._parent = None
            self._socket.close()
            self._start()
            return
        if self.exit_code is None and self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        code = -signal.SIGKILL
        if self._keeper is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._keeper.wait(timeout=keeper.LINGER_SECS)
            self._keeper.kill()  # Nothing, if it has ended.
            code = self._keeper.wait()
        if self.exit_code is None:
            self.exit_code, self.exit_time = code, time.monotonic()
        self._close()

    def _close(self) -> None:
        self.closed, self._parent = True, None
        os.close(self._log_fd)
        self._socket.close()
