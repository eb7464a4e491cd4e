"""All workers of a group meet before TensorFlow starts, or say who is missing.

TensorFlow waits for missing workers without a limit and holds Python's lock
meanwhile, so nothing in the process can end that wait; and a task that joins
under a wrong name takes the whole group down. So the workers first meet on the
chief's address, with plain sockets and a time limit, and then leave the
address to TensorFlow.
"""

import contextlib
import socket
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence

from tfdistill.system import processes
from tfdistill.system import untrusted

_RETRY_SECS = 0.2
_REPLY_SECS = 5.0


class MissingWorkersError(RuntimeError):
    """Not all workers came in time; the message names those that did not."""


class RefusedError(RuntimeError):
    """The chief refused this task; the message says why."""


def meet(
    *,
    name: str,
    identity: str,
    names: Sequence[str],
    chief_address: str,
    limit_secs: float,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Returns once all tasks of the group have met.

    `identity` is the same text in every task of the group and in no other
    group's; `names` has the chief first. `limit_secs` of 0 means no limit.
    """
    deadline = clock() + (limit_secs or float("inf"))
    if name == names[0]:
        port = int(chief_address.rpartition(":")[2])
        _gather(port, identity, names, deadline, limit_secs, clock)
    else:
        _report(chief_address, identity, name, deadline, limit_secs, clock)


def await_servers(
    servers: Mapping[str, str],
    *,
    name: str,
    limit_secs: float,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Returns once all servers of a group take connections.

    A coordinator does not meet its servers: one that was restarted comes
    back in the middle of training, when no task waits for it. `servers` has
    the `host:port` of each by name; `limit_secs` of 0 means no limit.
    """
    deadline = clock() + (limit_secs or float("inf"))
    while missing := {
        server: answer
        for server, address in servers.items()
        if (answer := processes.ask(address)) is not processes.Answer.OPEN
    }:
        if clock() > deadline:
            found = [
                f"{server} ({servers[server]} {answer.value})"
                for server, answer in missing.items()
            ]
            raise MissingWorkersError(
                f"{name} waited {limit_secs:.0f} s for {', '.join(found)}."
            )
        time.sleep(_RETRY_SECS)


def _gather(
    port: int,
    identity: str,
    names: Sequence[str],
    deadline: float,
    limit_secs: float,
    clock: Callable[[], float],
) -> None:
    """Waits, as the chief, for all others, then lets them go at once."""
    arrived: dict[str, socket.socket] = {}
    with _listen(port) as server, contextlib.ExitStack() as connections:
        server.settimeout(_RETRY_SECS)
        while len(arrived) < len(names) - 1:
            if clock() > deadline:
                missing = [n for n in names[1:] if n not in arrived]
                raise MissingWorkersError(
                    f"{names[0]} waited {limit_secs:.0f} s for "
                    f"{', '.join(missing)}, which did not come."
                )
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            connections.enter_context(connection)
            task, refusal = _judge(connection, identity, names, arrived)
            if refusal:
                untrusted.send(
                    connection, {"refused": refusal}, limit_secs=_REPLY_SECS
                )
                connection.close()
            elif task:
                arrived[task] = connection
            # One that has died meanwhile will come again, or is missing.
            for name in [n for n, c in arrived.items() if _gone(c)]:
                del arrived[name]
        # One that is gone will come again, or be missed.
        for connection in arrived.values():
            untrusted.send(connection, {"go": True}, limit_secs=_REPLY_SECS)


def _listen(port: int) -> socket.socket:
    return socket.create_server(
        ("", port), family=socket.AF_INET, backlog=128, reuse_port=False
    )


def _judge(
    connection: socket.socket,
    identity: str,
    names: Sequence[str],
    arrived: dict[str, socket.socket],
) -> tuple[str, str]:
    """Returns which task it is and why it is refused; both may be empty."""
    message = untrusted.receive(connection, limit_secs=_REPLY_SECS)
    if message is None or "task" not in message:
        connection.close()  # Not one of ours: a probe, or a scanner.
        return "", ""
    task = str(message["task"])
    if message.get("identity") != identity:
        return task, "it belongs to another cluster: compare the TF_CONFIGs."
    if task not in names[1:]:
        return task, f"the cluster has no {task} besides {names[0]}."
    if task in arrived and not _gone(arrived[task]):
        return task, f"there is another {task} already."
    return task, ""


def _gone(connection: socket.socket) -> bool:
    """Whether the other side has closed; nothing else is ever sent."""
    connection.settimeout(0.0)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _report(
    address: str,
    identity: str,
    name: str,
    deadline: float,
    limit_secs: float,
    clock: Callable[[], float],
) -> None:
    """Tells the chief that this task is there, and waits for its word."""
    host, _, port = address.rpartition(":")
    seen = "no task answers there"
    while clock() <= deadline:
        try:
            with socket.create_connection(
                (host.strip("[]"), int(port)), timeout=_REPLY_SECS
            ) as connection:
                untrusted.send(
                    connection,
                    {"identity": identity, "task": name},
                    limit_secs=_REPLY_SECS,
                )
                remaining = min(deadline - clock(), 1e6)
                answer = untrusted.receive(
                    connection, limit_secs=max(remaining, 0.1)
                )
        except OSError:
            answer = None
        else:
            seen = "its other workers have not all come, or it has started"
        if answer and answer.get("go"):
            return
        if answer and "refused" in answer:
            raise RefusedError(
                f"The chief at {address} refused {name}: {answer['refused']}"
            )
        time.sleep(_RETRY_SECS)
    raise MissingWorkersError(
        f"{name} waited {limit_secs:.0f} s for the chief at {address}: {seen}."
    )
