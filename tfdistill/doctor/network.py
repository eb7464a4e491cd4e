"""Is this task's address its own, and do the tasks of its group find it?

TensorFlow's own words for two swapped addresses, or for a port that another
process holds, are a start that never ends.

Only for the minute in which the doctors of a group look for each other. What is
told is the task's name and a digest of its TF_CONFIG; that it has the run's key
is proven without telling anything of it.
"""

import errno
import hashlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any
from typing import NamedTuple

from tfdistill.cluster import identity
from tfdistill.doctor import check
from tfdistill.doctor import environment
from tfdistill.exchange import signing
from tfdistill.system import untrusted

_REPLY_SECS = 5.0
_POLL_SECS = 0.2
_FIELD = "tfdistill_doctor"
_FORMAT = 1


class Answer(NamedTuple):
    """What a task has told of itself.

    Attributes:
        task: Its name, such as `worker:1`.
        identity: Digest of its group and its group's addresses.
        station: Differs for each process that answers.
        has_key: Whether it has proven that it has our key; None where we have
            none, or it has none.
        keyed: Whether it has a key.
        clock_secs: Its clock less ours, in seconds; 0 where it did not tell.
    """

    task: str
    identity: str
    station: str
    has_key: bool | None
    keyed: bool
    clock_secs: float


class NoAnswerError(RuntimeError):
    """Nobody answered, or nobody of ours; the message says what was seen."""


class Station:
    """Answers at one port until it is closed."""

    def __init__(
        self,
        *,
        task: str,
        identity: str,
        port: int,
        signer: signing.Signer | None = None,
    ) -> None:
        """Begins to listen.

        Args:
            task: This task's name.
            identity: The same text in every task of the group, and in no other
                group's.
            port: Of this task's address.
            signer: Of the run's key, if there is one.

        Raises:
            OSError: The port is taken, or may not be used.
        """
        self.task, self.identity = task, identity
        self.name = secrets.token_hex(8)
        self._signer = signer
        self._heard: dict[str, str] = {}
        # As TensorFlow does: on every interface, IPv4.
        self._server = socket.create_server(("", port), backlog=128)
        self._server.settimeout(_POLL_SECS)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def keyed(self) -> bool:
        """Whether this task has a key."""
        return self._signer is not None

    @property
    def heard(self) -> dict[str, str]:
        """Identities of the tasks that have asked, by name."""
        return dict(self._heard)

    def close(self) -> None:
        """Leaves the port to others."""
        self._closing.set()
        self._thread.join(_REPLY_SECS)
        self._server.close()

    def _serve(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._server.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            threading.Thread(
                target=self._answer, args=(connection,), daemon=True
            ).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            asked = _receive(connection)
            if asked is None:
                return  # A probe, or a scanner.
            question = str(asked.get("question", ""))
            told: dict[str, Any] = {
                _FIELD: _FORMAT,
                "task": self.task,
                "identity": self.identity,
                "station": self.name,
                "time": time.time(),
                "proof": None,
            }
            if self._signer is not None:
                told["proof"] = _proof(self._signer, question)
            if untrusted.send(connection, told, limit_secs=_REPLY_SECS):
                task = str(asked.get("task", ""))[:80]
                self._heard[task] = str(asked.get("identity", ""))[:80]

    def ask(self, address: str, *, timeout_secs: float = _REPLY_SECS) -> Answer:
        """Asks who is at an address.

        Args:
            address: `host:port`.
            timeout_secs: Longest wait for a connection.

        Raises:
            NoAnswerError: Nobody is, or nobody of ours.
        """
        host, _, port = address.rpartition(":")
        question = secrets.token_hex(16)
        asked = {
            _FIELD: _FORMAT,
            "task": self.task,
            "identity": self.identity,
            "question": question,
        }
        try:
            with socket.create_connection(
                (host.strip("[]"), int(port)), timeout=timeout_secs
            ) as connection:
                untrusted.send(connection, asked, limit_secs=_REPLY_SECS)
                told = _receive(connection)
        except ConnectionRefusedError:
            raise NoAnswerError("refuses connections") from None
        except TimeoutError:
            raise NoAnswerError("does not answer") from None
        except socket.gaierror as error:
            raise NoAnswerError(f"is no known host: {error.strerror}") from None
        except OSError as error:
            raise NoAnswerError(f"cannot be reached: {error}") from None
        if told is None:
            raise NoAnswerError("is held by something that is not the doctor")
        return self._understood(told, question)

    def _understood(self, told: dict[str, Any], question: str) -> Answer:
        proof = told.get("proof")
        has_key = None
        if self._signer is not None and isinstance(proof, str):
            expected = _bytes(_proof(self._signer, question))
            has_key = hmac.compare_digest(_bytes(proof), expected)
        clock = untrusted.number(told.get("time"))
        return Answer(
            task=str(told.get("task", ""))[:80],
            identity=str(told.get("identity", ""))[:80],
            station=str(told.get("station", ""))[:80],
            has_key=has_key,
            keyed=proof is not None,
            clock_secs=0.0 if clock is None else clock - time.time(),
        )


def _proof(signer: signing.Signer, question: str) -> str:
    return signer.proof(_bytes(question))


def _bytes(text: str) -> bytes:
    # JSON of others may hold what UTF-8 has no bytes for.
    return text.encode(errors="surrogatepass")


def _receive(connection: socket.socket) -> dict[str, Any] | None:
    """Reads one of our messages, or None for anything else."""
    message = untrusted.receive(connection, limit_secs=_REPLY_SECS)
    if message is None or message.get(_FIELD) != _FORMAT:
        return None
    return message


ADDRESS = "address"
REACH = "reach"
CLOCK = "clock"
MAX_CLOCK_SECS = 5.0
_RETRY_SECS = 0.5
# For the others to hear of what this task has found out already.
_LINGER_SECS = 5.0
_SAME_CONFIG = (
    "Give all tasks of a group the same cluster in TF_CONFIG, in the same "
    "order, and the same TFDISTILL_GROUP and TFDISTILL_NUM_GROUPS."
)


def identity_of(cluster: identity.Cluster) -> str:
    """Returns what all tasks of one group have in common, as a digest."""
    jobs = sorted((job, list(hosts)) for job, hosts in cluster.spec.items())
    text = f"{cluster.group} of {cluster.num_groups}: {jobs}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def open_station(
    cluster: identity.Cluster, signer: signing.Signer | None = None
) -> tuple[Station | None, check.Result]:
    """Listens on this task's own address, and looks whether it leads here.

    Args:
        cluster: This task, with an address.
        signer: Of the run's key, if there is one.

    Returns:
        What answers there, to be closed; None if it cannot; and the result.
    """
    address = str(cluster.address)
    port = int(address.rpartition(":")[2])
    try:
        station = Station(
            task=cluster.task_name,
            identity=identity_of(cluster),
            port=port,
            signer=signer,
        )
    except OSError as error:
        return None, _no_port(cluster, port, error)
    try:
        answer = station.ask(address)
        problem = ""
        if answer.station != station.name:
            problem = f"is answered by another process, {answer.task}"
    except NoAnswerError as error:
        problem = str(error)
    if problem:
        return station, check.failed(
            ADDRESS,
            f"{address}, the address of {cluster.task_name}, does not lead to "
            f"this host: it {problem}",
            "Start this task on the host that TF_CONFIG names for it, or "
            "correct its index or its address there; look at the firewall.",
        )
    return station, check.ok(
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
    cluster: identity.Cluster,
    station: Station,
    *,
    wait_secs: float,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[check.Result]:
    """Looks for all other tasks of the group, and waits until they have, too.

    Args:
        cluster: This task.
        station: What answers at its address.
        wait_secs: Longest time; the others must be examined meanwhile.
        clock: Seconds that never go backwards.
    """
    addresses = {
        f"{job}:{index}": address
        for job, hosts in cluster.spec.items()
        for index, address in enumerate(hosts)
        if (job, index) != (cluster.task_type, cluster.task_index)
    }
    answers: dict[str, Answer] = {}
    problems: dict[str, str] = {}
    deadline = clock() + wait_secs
    while True:
        for name in addresses.keys() - answers.keys():
            try:
                answers[name] = station.ask(
                    addresses[name], timeout_secs=min(5.0, wait_secs)
                )
            except NoAnswerError as error:
                problems[name] = str(error)
        unheard = addresses.keys() - station.heard.keys()
        if len(answers) == len(addresses) and not unheard:
            break
        if any(a.task != name for name, a in answers.items()):
            # It will not get better, but others shall find it out, too.
            deadline = min(deadline, clock() + _LINGER_SECS)
        if clock() >= deadline:
            break
        time.sleep(_RETRY_SECS)
    yield from _judge(cluster, station, addresses, answers, problems)


def _judge(
    cluster: identity.Cluster,
    station: Station,
    addresses: Mapping[str, str],
    answers: Mapping[str, Answer],
    problems: Mapping[str, str],
) -> Iterator[check.Result]:
    good = []
    for name, address in sorted(addresses.items()):
        answer = answers.get(name)
        if answer is None:
            yield check.failed(
                REACH,
                f"{name} at {address} {problems[name]}",
                f"Run the doctor as {name} at the same time (--wait_secs says "
                "how long this one waits); if it does run, open its port in "
                "the firewall, or correct its address in TF_CONFIG.",
            )
        elif answer.task != name:
            yield check.failed(
                REACH,
                f"{address}, the address of {name}, is answered by "
                f"{answer.task}",
                f"Swap the two addresses, or the indices of {name} and "
                f"{answer.task}, in TF_CONFIG. {_SAME_CONFIG}",
            )
        elif answer.identity != station.identity:
            yield check.failed(
                REACH,
                f"{name} at {address} has another TF_CONFIG, or belongs to "
                "another group",
                _SAME_CONFIG,
            )
        else:
            good.append(name)
    if good:
        yield check.ok(REACH, f"each at its own address: {', '.join(good)}")
    yield from _unheard(cluster, station, good)
    yield from _keys_and_clocks(station, answers)


def _unheard(
    cluster: identity.Cluster,
    station: Station,
    names: Iterable[str],
) -> Iterator[check.Result]:
    for name in names:
        if name not in station.heard:
            yield check.warning(
                REACH,
                f"{name} has answered, and has not asked {cluster.task_name}",
                f"Look at what the doctor says there: {name} may not reach "
                f"{cluster.address}.",
            )


def _keys_and_clocks(
    station: Station, answers: Mapping[str, Answer]
) -> Iterator[check.Result]:
    for name, answer in sorted(answers.items()):
        what = ""
        if answer.has_key is False:
            what = f"{name} has another key than this task"
        elif answer.keyed and not station.keyed:
            what = f"{name} has a key, and this task has none"
        elif station.keyed and not answer.keyed:
            what = f"this task has a key, and {name} has none"
        if what:
            yield check.failed(
                environment.KEY,
                what,
                f"export {signing.FILE_VARIABLE} with the same key for every "
                "task of every group.",
            )
        if abs(answer.clock_secs) > MAX_CLOCK_SECS:
            yield check.warning(
                CLOCK,
                f"the clock of {name} differs from this one by "
                f"{answer.clock_secs:+.0f} s",
                "Keep the clocks together with NTP (chronyc tracking): logs, "
                "curves and the status are read by them. No decision is.",
            )
