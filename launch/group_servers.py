"""One server of teachers for each group of a run on this machine.

Started before the groups, which find the addresses in the workdir, and ended
after them. Imports neither TensorFlow nor Keras.
"""

import contextlib
import functools
import json
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
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
# Of a report, what is added up.
_COUNTED = "process_seconds", "read_bytes"
_say = functools.partial(print, flush=True)


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
    """Returns the last report of each server.

    A run may be over before a server is up: it took nothing.
    """
    found = []
    for group in range(num_groups):
        tail = untrusted.Tail(_log(workdir, group), last_bytes=_TAIL_BYTES)
        found.append(([dict.fromkeys(_COUNTED, 0), *tail.read()])[-1])
    return found


def _command(
    topology: local_cluster.LocalCluster, group: int, port: int
) -> list[str]:
    exchange = topology.exchange or f"{topology.workdir}/exchange"
    return [
        *(sys.executable, "-m", "launch.teach"),
        *(f"--exchange={exchange}", f"--group={group}", f"--port={port}"),
    ]


def _log(workdir: str | os.PathLike[str], group: int) -> pathlib.Path:
    name = f"{run_files.group_name(group)}.log"
    return pathlib.Path(workdir, _DIRECTORY, name)


@contextlib.contextmanager
def running(
    topology: local_cluster.LocalCluster,
    *,
    say: Callable[[str], None] = _say,
    command: Callable[..., list[str]] = _command,
) -> Iterator[None]:
    """Runs the servers beside a block, which does not wait for them.

    They cannot outlive this process. One that ends before the block is
    reported at once, by a line that `say` takes; the groups train on without
    it.
    """
    path = pathlib.Path(topology.workdir, _DIRECTORY, _ADDRESSES)
    path.parent.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, **topology.env}
    if not signing.has_key(os.environ):
        # The key that the tasks sign with.
        env[signing.FILE_VARIABLE] = str(topology.key_path)
    with contextlib.ExitStack() as stack:
        found: list[str] = []
        servers: list[task_process.TaskProcess] = []
        stack.callback(_end, servers)
        for group, held in enumerate(
            local_cluster.reserve_ports(topology.num_groups)
        ):
            stack.enter_context(held)
            port = held.getsockname()[1]
            found.append(f"{local_cluster.HOST}:{port}")
            with _log(topology.workdir, group).open("wb") as log:
                servers.append(
                    task_process.TaskProcess(
                        command(topology, group, port), env=env, log_file=log
                    )
                )
        run_files.write(path, [json.dumps(found).encode()])
        stack.callback(path.unlink, missing_ok=True)
        ending = threading.Event()
        watch = threading.Thread(
            target=_report_ends, args=(topology, servers, ending, say)
        )
        watch.start()
        stack.callback(watch.join)
        stack.callback(ending.set)
        yield


def _report_ends(
    topology: local_cluster.LocalCluster,
    servers: Sequence[task_process.TaskProcess],
    ending: threading.Event,
    say: Callable[[str], None],
) -> None:
    running = dict(enumerate(servers))
    while not ending.wait(_WATCH_SECS):
        for group, server in list(running.items()):
            server.read()
            if server.exit_code is None:
                continue
            del running[group]
            say(
                f"warning: the server of group {group} ended before the "
                f"run, with exit code {server.exit_code}; from now on "
                "nobody learns from this group. Its log: "
                f"{_log(topology.workdir, group)}"
            )


def _end(servers: Sequence[task_process.TaskProcess]) -> None:
    """Ends all servers, each after the requests in progress."""
    for server in servers:
        server.request_stop()
    deadline = time.monotonic() + _STOP_SECS
    for server in servers:
        while not server.closed and time.monotonic() < deadline:
            time.sleep(_POLL_SECS)
            server.read()
        server.kill()
