"""One server of a teacher, as seen by those who ask it."""

import threading
import time
from typing import Any

import grpc

from tfdistill.labels import protocol
from tfdistill.system import background

UNREACHABLE, SLOW, REFUSED, BACKWARDS = (
    *("unreachable", "slow", "refused", "backwards"),
)
_KINDS = {
    grpc.StatusCode.UNAVAILABLE: UNREACHABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: SLOW,
    grpc.StatusCode.INTERNAL: protocol.MALFORMED,
}
_OPTIONS = [
    *protocol.CLIENT_OPTIONS,
    # How often a lost connection is tried again; gRPC itself would wait for up
    # to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # How long it may take to connect.
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


class Server:
    """Asks one server; leaves it alone for a while when that fails.

    Any thread may use it. While it is left alone, a thread of its own looks
    whether it is back.

    Attributes:
        address: Its `host:port`.
        version: The newest version that it has answered with, or -1.
        num_answers: How many of its answers were good.
        sent_bytes: Of all questions about batches.
        received_bytes: Of all answers to them, good or bad.
        problem: Why the last bad one was refused, or "".
    """

    def __init__(
        self,
        address: str,
        model: str,
        *,
        credentials: Any = None,
        probe_secs: float = 1.0,
        longest_pause_secs: float = 30.0,
    ) -> None:
        """Connects when it is asked first; `credentials` are gRPC's for TLS."""
        self.address = address
        self.version = -1
        self.num_answers = 0
        self.sent_bytes = self.received_bytes = 0
        self.problem = ""
        self._probe = protocol.metadata_question(model)
        self._probe_secs = probe_secs
        self._pause = background.Backoff(
            first_secs=0.1, longest_secs=longest_pause_secs
        )
        self._lock = threading.Lock()
        self._left_alone = False
        self._failed_at = 0.0
        self._closing = threading.Event()
        self._channel = (
            grpc.secure_channel(address, credentials, _OPTIONS)
            if credentials
            else grpc.insecure_channel(address, _OPTIONS)
        )
        # Bytes, so that what cannot be parsed is ours to refuse.
        self._predict, self._metadata = (
            self._channel.unary_unary(f"/{protocol.SERVICE}/{method}")
            for method in ("Predict", "GetModelMetadata")
        )

    @property
    def is_usable(self) -> bool:
        """Whether it is not being left alone."""
        return not self._left_alone

    def signature(self, *, timeout_secs: float) -> protocol.Signature:
        """Asks what the model takes and returns; BadAnswerError if it fails."""
        content = _called(self._metadata, self._probe, timeout_secs)
        return protocol.read_signature(content)

    def ask(
        self, question: bytes, expected: Any, *, timeout_secs: float
    ) -> tuple[int, list[Any]]:
        """Returns the version and its outputs; see `protocol.read_answer`.

        BadAnswerError if there is no answer in time, or a bad one.
        """
        asked_at, newest = time.monotonic(), self.version
        with self._lock:
            self.sent_bytes += len(question)
        try:
            content = _called(self._predict, question, timeout_secs)
            with self._lock:
                self.received_bytes += len(content)
            version, outputs = protocol.read_answer(content, expected)
            # Answers may overtake each other: it had given that one before
            # it was asked this.
            if version < newest:
                raise protocol.BadAnswerError(
                    BACKWARDS,
                    f"its version must not go backwards; received {version} "
                    f"after {newest}.",
                )
        except protocol.BadAnswerError as error:
            self._leave_alone(str(error), asked_at)
            raise
        with self._lock:
            self.version = max(self.version, version)
            self.num_answers += 1
            self._pause.succeeded()
        return version, outputs

    def close(self) -> None:
        """Ends the connection, and the look whether it is back."""
        self._closing.set()
        self._channel.close()

    def _leave_alone(self, reason: str, asked_at: float) -> None:
        with self._lock:
            self.problem = reason
            # Of questions that were asked at once, one failure counts.
            if self._left_alone or asked_at < self._failed_at:
                return
            if self._closing.is_set():
                return
            self._left_alone, self._failed_at = True, time.monotonic()
            secs = self._pause.failed()
        threading.Thread(
            target=self._bring_back,
            args=(secs,),
            name=f"tfdistill-labels-{self.address}",
            daemon=True,
        ).start()

    def _bring_back(self, secs: float) -> None:
        while not self._closing.wait(secs):
            try:
                self.signature(timeout_secs=self._probe_secs)
            except protocol.BadAnswerError as error:
                # Any other answer is one: the server is there.
                if error.kind in (UNREACHABLE, SLOW):
                    with self._lock:
                        secs = self._pause.failed()
                    continue
            except ValueError:  # gRPC's, once the channel is closed.
                return
            with self._lock:
                self._failed_at = time.monotonic()
                self._left_alone = False
            return


def _called(method: Any, question: bytes, timeout_secs: float) -> bytes:
    try:
        return bytes(method(question, timeout=timeout_secs))
    except grpc.RpcError as error:
        kind = _KINDS.get(error.code(), REFUSED)
        raise protocol.BadAnswerError(
            kind, f"{error.code().name}: {error.details()}"
        ) from error
