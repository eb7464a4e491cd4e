"""All tasks of a group meet before TensorFlow starts, or say who is missing.

TensorFlow waits for missing workers without a limit and holds Python's lock
meanwhile, so nothing in the process can end that wait; and a task that joins
under a wrong name takes the whole group down. So the workers first meet on the
chief's address, with plain sockets and a time limit, and then leave the
address to TensorFlow. The doctor has them meet on each task's address.
"""

import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

from tfdistill.cluster import identity
from tfdistill.system import processes
from tfdistill.system import untrusted

_RETRY_SECS = 0.2
# After which a task says what it waits for, and then again.
_WORD_SECS, AGAIN_SECS = 10.0, 30.0
_REPLY_SECS = 5.0
_LINE_BYTES = 4096


class MissingWorkersError(RuntimeError):
    """Not all workers came in time; the message names those that did not."""


class RefusedError(RuntimeError):
    """The task that others meet at refused this one; the message says why."""


def meet(
    cluster: identity.Cluster,
    *,
    limit_secs: float,
    host: str | None = None,
    together: bool = True,
) -> None:
    """Returns once all tasks of the group have come to the address of `host`.

    `host` is the name of a task, by default the chief. Unless `together`, the
    others need not wait for each other. `limit_secs` of 0 means no limit.
    OSError if this task cannot listen on its own address.
    """
    host = host or next(iter(cluster.addresses))
    if together:
        # Once TensorFlow finds that out, the others wait for it without limit.
        processes.listener(_port(cluster, cluster.task_name)).close()
    if host == cluster.task_name:
        _gather(cluster, limit_secs, together)
    else:
        _report(cluster, host, limit_secs)


@contextlib.contextmanager
def _told(what: Callable[[], str]) -> Iterator[None]:
    """Prints what is waited for after ten seconds, then every 30."""
    over = threading.Event()

    def say() -> None:
        pause = _WORD_SECS
        while not over.wait(pause):
            print(f"tfdistill: {what()}", file=sys.stderr, flush=True)
            pause = AGAIN_SECS

    threading.Thread(target=say, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _port(cluster: identity.Cluster, task: str) -> int:
    return int(cluster.addresses[task].rpartition(":")[2])


def await_servers(
    cluster: identity.Cluster,
    *,
    limit_secs: float,
) -> None:
    """Returns, on the coordinator, once all its servers take connections.

    They do not meet: one that was restarted comes back in the middle of
    training, when no task waits for it. `limit_secs` of 0 means no limit.
    """
    name = cluster.task_name
    servers = {k: v for k, v in cluster.addresses.items() if k != name}
    deadline = time.monotonic() + (limit_secs or float("inf"))
    missing: dict[str, processes.Answer] = {}

    def named() -> str:
        return ", ".join(
            f"{server} ({servers[server]} {answer.value})"
            for server, answer in missing.items()
        )

    with _told(lambda: f"{name} still waits for {named()}."):
        while missing := {
            server: answer
            for server, address in servers.items()
            if (answer := processes.ask(address)) is not processes.Answer.OPEN
        }:
            if time.monotonic() > deadline:
                raise MissingWorkersError(
                    f"{name} waited {limit_secs:.0f} s for {named()}."
                )
            time.sleep(_RETRY_SECS)


def _gather(
    cluster: identity.Cluster, limit_secs: float, together: bool
) -> None:
    """Waits for all others at this task's address, then lets them go."""
    deadline = time.monotonic() + (limit_secs or float("inf"))
    host = cluster.task_name
    missing = set(cluster.addresses) - {host}
    arrived: dict[str, socket.socket] = {}
    with (
        processes.listener(_port(cluster, host), backlog=128) as server,
        contextlib.ExitStack() as connections,
        _told(
            lambda: (
                f"{host} still waits for {', '.join(sorted(missing))}, "
                f"which did not connect to {cluster.addresses[host]} yet."
            )
        ),
    ):
        server.settimeout(_RETRY_SECS)
        while missing:
            if time.monotonic() > deadline:
                raise MissingWorkersError(
                    f"{host} waited {limit_secs:.0f} s for "
                    f"{', '.join(sorted(missing))}, which did not connect."
                )
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            connections.enter_context(connection)
            task, refusal = _judge(connection, cluster, arrived)
            if refusal:
                _send(connection, refused=refusal)
                connection.close()
            elif task:
                arrived[task] = connection
                missing.discard(task)
                if not together:
                    _send(connection, go=True)
            # One that has died meanwhile will come again, or is missing.
            for name in [n for n, c in arrived.items() if _gone(c)]:
                del arrived[name]
                if together:
                    missing.add(name)
        for connection in arrived.values() if together else ():
            _send(connection, go=True)


def _send(connection: socket.socket, **message: object) -> None:
    """Sends a line; one that is gone will come again, or be missed."""
    with contextlib.suppress(OSError):
        connection.settimeout(_REPLY_SECS)
        connection.sendall(json.dumps(message).encode() + b"\n")


def receive(
    connection: socket.socket, *, limit_secs: float
) -> dict[str, Any] | None:
    """Reads one line that holds a JSON object, whoever sent it.

    None for anything else, and if the whole line did not come in time.
    """
    deadline = time.monotonic() + limit_secs
    received = b""
    try:
        while not received.endswith(b"\n") and len(received) < _LINE_BYTES:
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
            if not (block := connection.recv(_LINE_BYTES)):
                return None
            received += block
    except OSError:
        return None
    return untrusted.json_object(received)


def _judge(
    connection: socket.socket,
    cluster: identity.Cluster,
    arrived: Mapping[str, socket.socket],
) -> tuple[str, str]:
    """Returns which task it is and why it is refused; both may be empty."""
    message = receive(connection, limit_secs=_REPLY_SECS)
    if message is None or "task" not in message:
        connection.close()  # Not one of ours: a probe, or a scanner.
        return "", ""
    task, host = str(message["task"]), cluster.task_name
    if message.get("cluster") != _text(cluster):
        return task, "it belongs to another cluster: compare the TF_CONFIGs."
    if message.get("host") != host:
        return task, f"this task is {host}. The two addresses may be swapped."
    if task not in cluster.addresses or task == host:
        return task, f"the cluster has no {task} besides {host}."
    if task in arrived and not _gone(arrived[task]):
        return task, f"another {task} has already connected."
    return task, ""


def _text(cluster: identity.Cluster) -> str:
    """Returns what only the tasks of one group have in common."""
    return f"group {cluster.group} of {cluster.num_groups}: {cluster.addresses}"


def _gone(connection: socket.socket) -> bool:
    """Whether the other side has closed; nothing else is ever sent."""
    connection.settimeout(0.0)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _report(cluster: identity.Cluster, host: str, limit_secs: float) -> None:
    """Tells the host that this task is there, and waits for its word."""
    deadline = time.monotonic() + (limit_secs or float("inf"))
    name, address = cluster.task_name, cluster.addresses[host]
    peer = address.rpartition(":")[0].strip("[]"), _port(cluster, host)
    message = {"cluster": _text(cluster), "host": host, "task": name}
    seen = ""

    def asked() -> dict[str, Any] | None:
        nonlocal seen
        try:
            with socket.create_connection(
                peer, timeout=_REPLY_SECS
            ) as connection:
                seen = (
                    "not all of its other workers have connected, or it has "
                    "already started"
                )
                _send(connection, **message)
                remaining = min(deadline - time.monotonic(), 1e6)
                return receive(connection, limit_secs=max(remaining, 0.1))
        except socket.gaierror as error:
            seen = f"it {processes.Answer.UNKNOWN.value} ({error.strerror})"
        except OSError:
            seen = "no task answers there"
        return None

    with _told(lambda: f"{name} still waits for {host} at {address}: {seen}."):
        while time.monotonic() <= deadline:
            answer = asked()
            if answer and answer.get("go"):
                return
            if answer and "refused" in answer:
                raise RefusedError(
                    f"{host} at {address} refused {name}: {answer['refused']}"
                )
            time.sleep(_RETRY_SECS)
    raise MissingWorkersError(
        f"{name} waited {limit_secs:.0f} s for {host} at {address}: {seen}."
    )
