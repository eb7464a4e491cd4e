"""Listens on a task's own address, and tells who asks which task it is.

Only for the minute in which the doctors of a group look for each other. What is
told is the task's name and a digest of its TF_CONFIG; that it has the run's key
is proven without telling anything of it.
"""

import hmac
import json
import secrets
import socket
import threading
import time
from typing import Any
from typing import NamedTuple

from tfdistill import json_values
from tfdistill import signing

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
            if _send(connection, told):
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
                _send(connection, asked)
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
        clock = json_values.number(told.get("time"))
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


def _send(connection: socket.socket, message: dict[str, Any]) -> bool:
    try:
        connection.settimeout(_REPLY_SECS)
        connection.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        return False
    return True


def _receive(connection: socket.socket) -> dict[str, Any] | None:
    """Reads one of our messages, or None for anything else."""
    message = json_values.receive(connection, limit_secs=_REPLY_SECS)
    if message is None or message.get(_FIELD) != _FORMAT:
        return None
    return message
