"""Is this task's address its own, and do the tasks of its group find it?

TensorFlow's own words for two swapped addresses, or for a port that another
process holds, are a start that never ends.

The doctors of a group tell each other, on the tasks' own addresses, their names
and digests of their TF_CONFIGs and of their keys. `cluster.rendezvous` will not
do: there all tasks meet at the chief's address, which says nothing of the
others' addresses, and nothing at all if two tasks take themselves for chief.
"""

import dataclasses
import errno
import hashlib
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

from tfdistill.cluster import identity
from tfdistill.doctor import check
from tfdistill.doctor import environment
from tfdistill.exchange import signing
from tfdistill.system import untrusted

ADDRESS = "address"
REACH = "reach"
CLOCK = "clock"
_REPLY_SECS = 5.0
_RETRY_SECS = 0.5
# For the others to hear of what this task has found out already.
_LINGER_SECS = 5.0
_MAX_CLOCK_SECS = 5.0
_FIELD = "tfdistill_doctor"
_FORMAT = 2
_SAME_CONFIG = (
    "Give all tasks of a group the same cluster in TF_CONFIG, in the same "
    "order, and the same TFDISTILL_GROUP and TFDISTILL_NUM_GROUPS."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Card:
    """What a task says of itself.

    `identity` is a digest of its group and addresses, `key` one made with its
    key (empty without one); `clock_secs` is its clock less that of the task
    that asked.
    """

    task: str
    identity: str
    key: str
    process: str
    clock_secs: float = 0.0


class NoAnswerError(RuntimeError):
    """No doctor of this group answered; the message says what was seen."""


def card_of(cluster: identity.Cluster, signer: signing.Signer | None) -> Card:
    """Returns what this task says of itself."""
    jobs = sorted((job, list(hosts)) for job, hosts in cluster.spec.items())
    text = f"{cluster.group} of {cluster.num_groups}: {jobs}".encode()
    return Card(
        task=cluster.task_name,
        identity=hashlib.sha256(text).hexdigest()[:16],
        key=signer.proof(text) if signer else "",
        process=secrets.token_hex(8),
    )


class Responder(socketserver.ThreadingTCPServer):
    """Answers with a task's card at its port, until it is closed."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, own: Card, port: int, clock: Callable[[], float] = time.time
    ) -> None:
        """Begins to listen; OSError if the port is taken or forbidden."""
        self.own = own
        self.heard: set[str] = set()
        self._clock = clock
        # As TensorFlow does: on every interface, IPv4.
        super().__init__(("", port), socketserver.BaseRequestHandler)
        threading.Thread(
            target=self.serve_forever, args=(0.1,), daemon=True
        ).start()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answers one task; runs in a thread of its own."""
        asked = _receive(request, self._clock)
        # Else it is a probe, or a scanner.
        if asked is not None and _send(request, self.own, self._clock):
            self.heard.add(asked.task)

    def ask(self, address: str, *, timeout_secs: float = _REPLY_SECS) -> Card:
        """Returns the card of the task at `host:port`, or NoAnswerError."""
        host, _, port = address.rpartition(":")
        try:
            with socket.create_connection(
                (host.strip("[]"), int(port)), timeout=timeout_secs
            ) as connection:
                _send(connection, self.own, self._clock)
                found = _receive(connection, self._clock)
        except ConnectionRefusedError:
            raise NoAnswerError("refuses connections") from None
        except TimeoutError:
            raise NoAnswerError("does not answer") from None
        except socket.gaierror as error:
            raise NoAnswerError(f"is no known host: {error.strerror}") from None
        except OSError as error:
            raise NoAnswerError(f"cannot be reached: {error}") from None
        if found is None:
            raise NoAnswerError("is held by something that is not the doctor")
        return found

    def close(self) -> None:
        """Leaves the port to others."""
        self.shutdown()
        self.server_close()


def _send(
    connection: socket.socket, own: Card, clock: Callable[[], float]
) -> bool:
    message = dataclasses.asdict(own) | {_FIELD: _FORMAT, "time": clock()}
    return untrusted.send(connection, message, limit_secs=_REPLY_SECS)


def _receive(
    connection: socket.socket, clock: Callable[[], float]
) -> Card | None:
    """Reads the card of another doctor, or None for anything else."""
    message = untrusted.receive(connection, limit_secs=_REPLY_SECS)
    if message is None or message.get(_FIELD) != _FORMAT:
        return None
    texts = {
        name: str(message.get(name, ""))[:80]
        for name in ("task", "identity", "key", "process")
    }
    told = untrusted.number(message.get("time"))
    apart = 0.0 if told is None else told - clock()
    return Card(**texts, clock_secs=apart)


def examine(
    cluster: identity.Cluster,
    signer: signing.Signer | None,
    *,
    reach: bool,
    wait_secs: float,
) -> Iterator[check.Result]:
    """Checks this task's own address, and those of its group if `reach`."""
    if cluster.address is None:
        yield check.skipped(ADDRESS, "one task, without TF_CONFIG")
        yield check.skipped(REACH, "one task: nobody to reach")
        return
    responder, result = listen(cluster, signer)
    yield result
    if responder is None:
        yield check.skipped(REACH, "its own address comes first")
        return
    try:
        if sum(map(len, cluster.spec.values())) == 1:
            yield check.skipped(REACH, "one task: nobody to reach")
        elif not reach:
            yield check.skipped(REACH, "not asked for (--no_reach)")
        else:
            yield from others(cluster, responder, wait_secs=wait_secs)
    finally:
        responder.close()


def listen(
    cluster: identity.Cluster,
    signer: signing.Signer | None = None,
    *,
    clock: Callable[[], float] = time.time,
    ask: Callable[[Responder, str], Card] = Responder.ask,
) -> tuple[Responder | None, check.Result]:
    """Listens on this task's own address, and looks whether it leads here.

    Returns the responder, to be closed, or None if the port cannot be used; and
    the result. `ask` asks at an address.
    """
    address = str(cluster.address)
    port = int(address.rpartition(":")[2])
    try:
        responder = Responder(card_of(cluster, signer), port, clock)
    except OSError as error:
        return None, _no_port(cluster, port, error)
    try:
        answer = ask(responder, address)
        problem = ""
        if answer.process != responder.own.process:
            problem = f"is answered by another process, {answer.task}"
    except NoAnswerError as error:
        problem = str(error)
    if problem:
        return responder, check.failed(
            ADDRESS,
            f"{address}, the address of {cluster.task_name}, does not lead to "
            f"this host: it {problem}",
            "Start this task on the host that TF_CONFIG names for it, or "
            "correct its index or its address there; look at the firewall.",
        )
    return responder, check.ok(
        ADDRESS, f"{address} is free, and leads to this host"
    )


def _no_port(
    cluster: identity.Cluster, port: int, error: OSError
) -> check.Result:
    if error.errno == errno.EADDRINUSE:
        return check.failed(
            ADDRESS,
            f"port {port} of {cluster.task_name} is taken by another process",
            f"Find it with `ss -ltnp 'sport = :{port}'` and end it, such as a "
            "task of an earlier run; or give the task another port in every "
            "task's TF_CONFIG. The doctor runs before the tasks, not beside "
            "them.",
        )
    return check.failed(
        ADDRESS,
        f"{cluster.task_name} may not listen on port {port}: {error.strerror}",
        "Choose a port from 1024 up in every task's TF_CONFIG.",
    )


def others(
    cluster: identity.Cluster, responder: Responder, *, wait_secs: float
) -> Iterator[check.Result]:
    """Looks for all other tasks of the group, and waits until they have, too.

    The others must be examined within `wait_secs`.
    """
    addresses = {
        f"{job}:{index}": address
        for job, hosts in cluster.spec.items()
        for index, address in enumerate(hosts)
        if (job, index) != (cluster.task_type, cluster.task_index)
    }
    answers: dict[str, Card] = {}
    problems: dict[str, str] = {}
    deadline = time.monotonic() + wait_secs
    while True:
        for name in addresses.keys() - answers.keys():
            try:
                answers[name] = responder.ask(
                    addresses[name], timeout_secs=min(_REPLY_SECS, wait_secs)
                )
            except NoAnswerError as error:
                problems[name] = str(error)
        unheard = addresses.keys() - responder.heard
        if len(answers) == len(addresses) and not unheard:
            break
        if any(answer.task != name for name, answer in answers.items()):
            # It will not get better, but others shall find it out, too.
            deadline = min(deadline, time.monotonic() + _LINGER_SECS)
        if time.monotonic() >= deadline:
            break
        time.sleep(_RETRY_SECS)
    good = []
    for name, address in sorted(addresses.items()):
        fault = _fault(
            responder.own, name, address, answers.get(name), problems.get(name)
        )
        if fault is None:
            good.append(name)
        else:
            yield fault
    if good:
        yield check.ok(REACH, f"each at its own address: {', '.join(good)}")
    for name in set(good) - responder.heard:
        yield check.warning(
            REACH,
            f"{name} answered, but did not ask {cluster.task_name}",
            f"Look at what the doctor says there: {name} may not reach "
            f"{cluster.address}.",
        )
    yield from _keys_and_clocks(responder.own, answers)


def _fault(
    own: Card,
    name: str,
    address: str,
    answer: Card | None,
    problem: str | None,
) -> check.Result | None:
    """Returns why the address of a task is wrong; None if it is not."""
    if answer is None:
        return check.failed(
            REACH,
            f"{name} at {address} {problem}",
            f"Run the doctor as {name} at the same time (--wait_secs says how "
            "long this one waits); if it does run, open its port in the "
            "firewall, or correct its address in TF_CONFIG.",
        )
    if answer.task != name:
        return check.failed(
            REACH,
            f"{address}, the address of {name}, is answered by {answer.task}",
            f"Swap the two addresses, or the indices of {name} and "
            f"{answer.task}, in TF_CONFIG. {_SAME_CONFIG}",
        )
    if answer.identity != own.identity:
        return check.failed(
            REACH,
            f"{name} at {address} has another TF_CONFIG, or belongs to "
            "another group",
            _SAME_CONFIG,
        )
    return None


def _keys_and_clocks(
    own: Card, answers: Mapping[str, Card]
) -> Iterator[check.Result]:
    for name, answer in sorted(answers.items()):
        same_cluster = answer.identity == own.identity
        what = ""
        if answer.key and own.key:
            # The digest is of the TF_CONFIG, too.
            if same_cluster and answer.key != own.key:
                what = f"{name} has another key than this task"
        elif answer.key:
            what = f"{name} has a key, and this task has none"
        elif own.key:
            what = f"this task has a key, and {name} has none"
        if what:
            yield check.failed(
                environment.KEY,
                what,
                f"export {signing.FILE_VARIABLE} with the same key for every "
                "task of every group.",
            )
        if abs(answer.clock_secs) > _MAX_CLOCK_SECS:
            yield check.warning(
                CLOCK,
                f"the clock of {name} differs from this one by "
                f"{answer.clock_secs:+.0f} s",
                "Synchronize the clocks with NTP (chronyc tracking): logs, "
                "curves and the status show their time. No decision uses it.",
            )
