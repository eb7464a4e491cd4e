"""One server of teachers for each group of a run on this machine.

Started before the groups, which find the addresses in the workdir, and ended
after them. Imports neither TensorFlow nor Keras.
"""

import contextlib
import json
import os
import pathlib
import socket
import sys
import threading
import time
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

from launch import recipes
from tfdistill.exchange import signing
from tfdistill.launcher import local_cluster
from tfdistill.launcher import task_process
from tfdistill.system import run_files
from tfdistill.system import untrusted

_DIRECTORY, _ADDRESSES = "servers", "addresses.json"
# As long as a server takes to answer what was asked, and a little more.
_STOP_SECS = 7.0
_POLL_SECS, _WATCH_SECS = 0.05, 0.5
_TAIL_BYTES = 4096


def are_needed(recipe: recipes.Recipe, num_groups: int) -> bool:
    """Whether groups ask servers that somebody has yet to start."""
    asks = recipe.method == "served" and num_groups > 1
    return asks and not recipe.method_arguments.get("addresses")


def addresses(workdir: str | os.PathLike[str]) -> tuple[str, ...] | None:
    """Returns `host:port` by group; None if no launcher has started servers."""
    try:
        text = (pathlib.Path(workdir) / _DIRECTORY / _ADDRESSES).read_text()
    except FileNotFoundError:
        return None
    return tuple(json.loads(text))


def usage(
    workdir: str | os.PathLike[str], num_groups: int
) -> list[dict[str, Any]]:
    """Returns the last report of each server; {} of one that made none."""
    found = []
    for group in range(num_groups):
        tail = untrusted.Tail(_log(workdir, group), last_bytes=_TAIL_BYTES)
        found.append(([{}, *tail.read()])[-1])
    return found


def _log(workdir: str | os.PathLike[str], group: int) -> pathlib.Path:
    name = f"{run_files.group_name(group)}.log"
    return pathlib.Path(workdir, _DIRECTORY, name)


class GroupServers:
    """Runs the servers; leaving its `with` block ends them.

    They cannot outlive this process. One that ends before is reported at once;
    the groups train on without it.
    """

    def __init__(
        self,
        topology: local_cluster.LocalCluster,
        *,
        say: Callable[[str], None],
    ) -> None:
        """Starts nothing yet; `say` takes a line for the user."""
        self._topology = topology
        self._say = say
        self._path = pathlib.Path(topology.workdir, _DIRECTORY, _ADDRESSES)
        self._ports: list[socket.socket] = []
        self._servers: list[task_process.TaskProcess] = []
        self._closing = threading.Event()
        self._watch = threading.Thread(target=self._report_ends, daemon=True)

    def __enter__(self) -> "GroupServers":
        """Starts all servers, without waiting for them."""
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Ends what is left."""
        self.close()

    def _start(self) -> None:
        num_groups = self._topology.num_groups
        self._ports = local_cluster.reserve_ports(num_groups)
        ports = [held.getsockname()[1] for held in self._ports]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        found = [f"{local_cluster.HOST}:{port}" for port in ports]
        run_files.write(self._path, [json.dumps(found).encode()])
        env = self._environ()
        for group, port in enumerate(ports):
            with _log(self._topology.workdir, group).open("wb") as log:
                self._servers.append(
                    task_process.TaskProcess(
                        self._command(group, port), env=env, log_file=log
                    )
                )
        self._watch.start()

    def _command(self, group: int, port: int) -> list[str]:
        topology = self._topology
        exchange = topology.exchange or f"{topology.workdir}/exchange"
        return [
            *(sys.executable, "-m", "launch.teach"),
            *(f"--exchange={exchange}", f"--group={group}", f"--port={port}"),
        ]

    def _environ(self) -> Mapping[str, str]:
        """The launcher's environment, with the key that the tasks sign with."""
        env = {**os.environ, **self._topology.env}
        if not signing.has_key(os.environ):
            env[signing.FILE_VARIABLE] = str(self._topology.key_path)
        return env

    def _report_ends(self) -> None:
        running = dict(enumerate(self._servers))
        while not self._closing.wait(_WATCH_SECS):
            for group, server in list(running.items()):
                server.read()
                if server.exit_code is None:
                    continue
                del running[group]
                self._say(
                    f"warning: the server of group {group} ended before the "
                    f"run, with exit code {server.exit_code}; from now on "
                    "nobody learns from this group. Its log: "
                    f"{_log(self._topology.workdir, group)}"
                )

    def close(self) -> None:
        """Ends all servers, each after the requests in progress."""
        self._closing.set()
        if self._watch.is_alive():
            self._watch.join()
        with contextlib.suppress(OSError):
            self._path.unlink()
        for server in self._servers:
            server.request_stop()
        deadline = time.monotonic() + _STOP_SECS
        for server in self._servers:
            while not server.closed and time.monotonic() < deadline:
                time.sleep(_POLL_SECS)
                server.read()
            server.kill()
        self._servers = []
        for held in self._ports:
            held.close()
        self._ports = []
