"""The parent that a group's tasks on one node share; see launcher/parent.py.

The node's first task starts it, and gives its own end of the parent's socket to
the others, which then ask the parent by themselves. They meet at a Unix socket
with an abstract name, which is no file, and so leaves none behind; both sides
check that the other is the same user's.

Slurm sends a signal to every process of a step, hence to a task itself. So the
parent and the tasks' keepers hold signals back.
"""

import contextlib
import dataclasses
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from tfdistill.launcher import parent as launcher_parent

# Between the starts of two tasks of a step.
_MEET_SECS = 10.0
_POLL_SECS = 0.1
# Between two looks at what no descriptor tells of.
_LOOK_SECS = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeParent:
    """What one task on a node knows of their parent.

    Attributes:
        name: The socket's, of this step and node only.
        starts: Whether it is this task that starts the parent.
        preload: What that imports.
        signals: What Slurm may send.
        told: What it has sent; after SIGTERM no task is started.
    """

    name: str
    starts: bool
    preload: Sequence[str]
    signals: Sequence[signal.Signals]
    told: Sequence[int]

    def run(
        self, command: Sequence[str], *, env: Mapping[str, str], log_fd: int
    ) -> int | None:
        """Runs a command as a fork, to its end.

        Returns its exit code, or minus the number of a signal; None if it was
        not started.
        """
        if self.starts:
            self._start(command, env)
        control = self._find()
        if control is None:
            return None
        ours, theirs = socket.socketpair()
        with ours:
            with control, theirs:
                launcher_parent.ask(
                    control,
                    command,
                    env=env,
                    log_fd=log_fd,
                    keeper_fd=theirs.fileno(),
                )
            return self._wait(ours)

    def _start(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Starts the parent, which ends with this process."""
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(f"\0{self.name}")
        except OSError:  # Another user's process has taken the name.
            return
        listener.listen(socket.SOMAXCONN)
        listener.setblocking(False)
        parents = launcher_parent.Parents()
        earlier = signal.pthread_sigmask(signal.SIG_BLOCK, self.signals)
        try:
            parent = parents.of(command, env, preload=self.preload)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, earlier)

        def hand_out() -> None:
            while True:
                sources: list[Any] = [listener]
                if parent and not parent.failure:
                    sources.append(parent)
                select.select(sources, [], [], _LOOK_SECS)
                for text, _ in parents.news():
                    print(text, file=sys.stderr, flush=True)
                with contextlib.suppress(OSError):  # Nobody has asked.
                    connection, _ = listener.accept()
                    with connection:
                        if parent and not parent.failure:
                            if _is_own(connection):
                                fds = [parent.fileno()]
                                socket.send_fds(connection, [b"."], fds)

        threading.Thread(target=hand_out, daemon=True).start()

    def _find(self) -> socket.socket | None:
        """Returns the launcher's end of the parent's socket.

        None if nobody has one, or the task is to end.
        """
        fds: list[int] = []
        limit = time.monotonic() + _MEET_SECS
        with socket.socket(socket.AF_UNIX) as source:
            while source.connect_ex(f"\0{self.name}"):
                if signal.SIGTERM in self.told or time.monotonic() > limit:
                    return None
                time.sleep(_POLL_SECS)
            if _is_own(source):
                source.settimeout(_MEET_SECS)
                with contextlib.suppress(OSError):
                    _, fds, _, _ = socket.recv_fds(source, 1, 1)
        return socket.socket(fileno=fds[0]) if fds else None

    def _wait(self, keeper: socket.socket) -> int | None:
        """Returns what `run` does, by the reports of a task's keeper."""
        reports = b""
        keeper.settimeout(_LOOK_SECS)
        while True:
            try:
                data = keeper.recv(4096)
            except TimeoutError:
                if signal.SIGTERM in self.told and not reports:
                    return None  # So it is not started any more.
                continue
            except ConnectionResetError:
                data = b""
            if not data:
                break
            reports += data
        # Lines of a name, a number and a time; "pid" is the first.
        words = reports.split()
        if b"exit" in words:
            return int(words[words.index(b"exit") + 1])
        return -signal.SIGKILL if words else None


def _is_own(peer: socket.socket) -> bool:
    """Whether a process of the same user has the other end."""
    fields = struct.Struct("3i")  # As of struct ucred.
    data = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, fields.size)
    return bool(fields.unpack(data)[1] == os.getuid())
