"""Answers PredictionService's requests about the newest version of a group.

Values go into one of two copies of the graph while the other one answers, so
that no answer mixes two versions, and no version costs a load of its own.
"""

import collections
import contextlib
import logging
import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import tensorflow as tf

from tfdistill.exchange import publisher
from tfdistill.exchange import versions
from tfdistill.exports import other_graphs
from tfdistill.exports import saved_model
from tfdistill.exports import student_graph
from tfdistill.follow import follower
from tfdistill.follow import screen as screen_lib
from tfdistill.labels import protocol

# How long a request may hold the copy that the next version needs.
_IDLE_SECS = 60.0
# Requests that may wait for a thread, for each one that has one.
_WAITING = 16
_STOP_SECS = 5.0
_log = logging.getLogger(__name__)


def _signature(version: versions.Version) -> protocol.Signature:
    """What a version takes and returns, by its manifest."""
    said = version.manifest.inputs, version.manifest.outputs
    try:
        return protocol.Signature(*map(_specs, said))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            "its manifest must give shape and dtype of each input and output; "
            f"received {said}."
        ) from error


def _specs(described: Any) -> protocol.Specs:
    return {
        name: tf.TensorSpec(leaf["shape"], tf.as_dtype(leaf["dtype"]), name)
        for name, leaf in described.items()
    }


class _Copy:
    """One copy of a graph: the version in it, and how many use it."""

    def __init__(
        self, function: other_graphs.FrozenFunction, fingerprint: str
    ) -> None:
        self.version = -1
        self.num_users = 0
        self.function, self.fingerprint = function, fingerprint

    def install(self, version: int, values: saved_model.Snapshot) -> None:
        """Puts a version's values in place; ValueError if they do not fit."""
        pairs = zip(self.function.variables, values, strict=True)
        for variable, value in pairs:
            variable.assign(tf.cast(value, variable.dtype))
        self.version = version


class Followed:
    """Follows one group of an exchange, in the background.

    A version is used after the checks of a peer's version: its files against
    the signed manifest, what its graph may hold, finite variables, and the
    inputs, outputs and schema of the first version.
    """

    def __init__(
        self,
        exchange: publisher.Exchange,
        group: int,
        *,
        trust_graph: bool = False,
    ) -> None:
        """Reads nothing yet; `trust_graph` loads graphs that hold anything."""
        # Of the versions that were read.
        self.num_refused = self.num_bytes = 0
        # What all versions must take and return, by the first.
        self.signature: protocol.Signature | None = None
        self._schema: Any = {}
        self._exchange = exchange
        self._trust_graph = trust_graph
        self._changed = threading.Condition()
        self._current: _Copy | None = None
        self._idle: _Copy | None = None
        self._follower = follower.Follower(
            exchange,
            group,
            read=self._read,
            screen=self._screen,
            alone=True,
        )
        self._following = follower.Following(
            [self._follower], proposes=True, also=self._swap
        )
        # Start to look for versions; and end.
        self.start, self.stop = self._following.start, self._following.stop

    @property
    def version(self) -> int:
        """The step of the version that answers now, or -1."""
        current = self._current
        return current.version if current else -1

    @contextlib.contextmanager
    def current(self) -> Iterator[_Copy | None]:
        """Gives the newest version, which stays as it is in the block."""
        with self._changed:
            copy = self._current
            if copy is not None:
                copy.num_users += 1
        try:
            yield copy
        finally:
            if copy is not None:
                with self._changed:
                    copy.num_users -= 1
                    self._changed.notify_all()

    def _screen(self, version: versions.Version) -> None:
        signature = self.signature or _signature(version)
        screen_lib.Screen(signature, schema=self._schema)(version)

    def _read(self, version: versions.Version) -> _Copy:
        """Returns a copy of the graph with the version's values in it."""
        signature = self.signature or _signature(version)
        found = version.manifest
        variables = saved_model.in_order(found.variables)
        values = saved_model.read_variables(version.path, variables)
        copy = self._idle
        if copy is None or copy.fingerprint != found.graph_fingerprint:
            function = other_graphs.load_version(
                self._exchange, version, signature, trust=self._trust_graph
            )
            self._idle = copy = _Copy(function, found.graph_fingerprint)
        with self._changed:
            if not self._changed.wait_for(
                lambda: copy.num_users == 0, timeout=_IDLE_SECS
            ):
                raise OSError("a request has not ended yet.")
        copy.install(version.step, values)
        if self.signature is None:
            self.signature = signature
            self._schema = found.extras.get(screen_lib.SCHEMA_FIELD)
        return copy

    def _swap(self) -> None:
        if self._follower.state == follower.FAILED:
            self._follower.reject(self._follower.announced)
            self.num_refused += 1
        elif self._follower.state == follower.READY:
            taken = self._follower.take()
            self.num_bytes += taken.version.num_bytes
            with self._changed:
                self._current, self._idle = taken.values, self._current
            _log.info("Serving version %d.", taken.version.step)


class _RefusedError(Exception):
    """A request that cannot be answered: why, and by which code."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Server(protocol.Servicer):
    """Answers clients about the version that is in use.

    Attributes:
        port: Where it listens.
        counts: How many `requests` it has answered, and how many `failed`.
    """

    def __init__(
        self,
        followed: Followed,
        *,
        model: str = "default",
        host: str = "127.0.0.1",
        port: int = 0,
        num_threads: int = 4,
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        """Listens, on any free port if it is 0; OSError if it is taken.

        `credentials` are those of TLS.
        """
        self.counts = collections.Counter(requests=0, failed=0)
        self._followed = followed
        self._model = model
        self._grpc = grpc.server(
            futures.ThreadPoolExecutor(num_threads),
            maximum_concurrent_rpcs=num_threads * _WAITING,
            options=protocol.SERVER_OPTIONS,
        )
        protocol.register(self, self._grpc)
        try:
            self.port = (
                self._grpc.add_secure_port(f"{host}:{port}", credentials)
                if credentials
                else self._grpc.add_insecure_port(f"{host}:{port}")
            )
        except RuntimeError as error:
            raise OSError(
                f"{host}:{port} must be free, and TLS's key and certificate "
                f"must fit: {error}"
            ) from error

    def start(self) -> None:
        """Starts to answer, in threads."""
        self._grpc.start()

    def stop(self) -> None:
        """Answers what was asked, for 5 s at most, and closes the port."""
        self._grpc.stop(_STOP_SECS).wait()

    def Predict(self, request: Any, context: Any) -> Any:
        """Answers PredictionService's request of this name."""
        with self._asked(request, context) as (copy, signature):
            inputs = protocol.arrays(request.inputs, signature.input_spec)
            names = student_graph.leaf_names(signature.output_spec, "outputs")
            outputs = zip(names, copy.function(inputs), strict=True)
            return protocol.answer(self._model, copy.version, dict(outputs))

    def GetModelMetadata(self, request: Any, context: Any) -> Any:
        """Answers PredictionService's request of this name."""
        with self._asked(request, context) as (copy, signature):
            return protocol.metadata(self._model, copy.version, signature)

    @contextlib.contextmanager
    def _asked(
        self, request: Any, context: Any
    ) -> Iterator[tuple[_Copy, protocol.Signature]]:
        """Gives what was asked about, and counts; what fails is refused."""
        code = grpc.StatusCode.INVALID_ARGUMENT
        try:
            with self._followed.current() as copy:
                yield self._checked(request.model_spec, copy)
            self.counts["requests"] += 1
            return
        except _RefusedError as error:
            code, reason = error.code, str(error)
        except (protocol.BadAnswerError, tf.errors.OpError) as error:
            reason = str(error)
        self.counts["failed"] += 1
        context.abort(code, reason)

    def _checked(
        self, spec: Any, copy: _Copy | None
    ) -> tuple[_Copy, protocol.Signature]:
        """Returns what was asked about, if it is there."""
        signature = self._followed.signature
        if copy is None or signature is None:
            raise _RefusedError(
                grpc.StatusCode.UNAVAILABLE,
                "The group has published no good version yet.",
            )
        served = self._model, copy.version, "", protocol.SIGNATURE
        asked = (
            spec.name,
            spec.version.value if spec.HasField("version") else copy.version,
            spec.version_label,
            spec.signature_name or protocol.SIGNATURE,
        )
        if asked != served:
            raise _RefusedError(
                grpc.StatusCode.NOT_FOUND,
                "Model, version, its label and signature must be "
                f"{served}; received {asked}.",
            )
        return copy, signature
