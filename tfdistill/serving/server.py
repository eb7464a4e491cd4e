"""Answers PredictionService's requests about the newest version of a group.

Values go into one of two copies of the graph while the other one answers, so
that no answer mixes two versions, and no version costs a load of its own.
"""

import collections
import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from concurrent import futures
from typing import Any

import grpc
import numpy as np
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


@dataclasses.dataclass
class _Specs:
    """What all versions of the group must take and return, by the first."""

    input_spec: Any
    output_spec: Any

    @classmethod
    def of(cls, version: versions.Version) -> "_Specs":
        try:
            return cls(*map(_specs, _said(version)))
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                "its manifest must give shape and dtype of each input and "
                f"output; received {_said(version)}."
            ) from error


def _said(version: versions.Version) -> tuple[Any, Any]:
    return version.manifest.inputs, version.manifest.outputs


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

    def install(self, values: saved_model.Snapshot) -> None:
        """Puts a version's values in place; ValueError if they do not fit."""
        variables = self.function.variables
        if len(variables) != len(values) or not all(
            value is not None and variable.shape.is_compatible_with(value.shape)
            for variable, value in zip(variables, values, strict=True)
        ):
            raise ValueError(
                "its graph must have the variables that its manifest names."
            )
        for variable, value in zip(variables, values, strict=True):
            variable.assign(tf.cast(value, variable.dtype))


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
        self.specs: _Specs | None = None
        self._screen: Callable[[versions.Version], Any] = _Specs.of
        self._exchange = exchange
        self._trust_graph = trust_graph
        self._changed = threading.Condition()
        self._current: _Copy | None = None
        self._idle: _Copy | None = None
        self._follower = follower.Follower(
            exchange,
            group,
            read=self._read,
            screen=lambda version: self._screen(version),
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

    def _read(self, version: versions.Version) -> _Copy:
        """Returns a copy of the graph with the version's values in it."""
        specs = self.specs or _Specs.of(version)
        found = version.manifest
        variables = saved_model.in_order(found.variables)
        values = saved_model.read_variables(version.path, variables)
        copy = self._idle
        if copy is None or copy.fingerprint != found.graph_fingerprint:
            function = other_graphs.load_version(
                self._exchange, version, specs, trust=self._trust_graph
            )
            self._idle = copy = _Copy(function, found.graph_fingerprint)
        with self._changed:
            if not self._changed.wait_for(
                lambda: copy.num_users == 0, timeout=_IDLE_SECS
            ):
                raise OSError("a request has not ended yet.")
        copy.install(values)
        copy.version = version.step
        if self.specs is None:
            schema = found.extras.get(screen_lib.SCHEMA_FIELD)
            self.specs = specs
            self._screen = screen_lib.Screen(
                specs, schema=schema if isinstance(schema, Mapping) else {}
            )
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

    def __init__(
        self,
        reason: str,
        code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT,
    ) -> None:
        super().__init__(reason)
        self.code = code


class Server:
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
        messages = protocol.messages()
        self._grpc = grpc.server(
            futures.ThreadPoolExecutor(num_threads),
            maximum_concurrent_rpcs=num_threads * _WAITING,
            options=protocol.SERVER_OPTIONS,
        )
        methods = {
            "Predict": grpc.unary_unary_rpc_method_handler(
                self._answering(self._predict, messages.PredictRequest)
            ),
            "GetModelMetadata": grpc.unary_unary_rpc_method_handler(
                self._answering(self._metadata, messages.MetadataRequest)
            ),
        }
        self._grpc.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(protocol.SERVICE, methods)]
        )
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

    def _answering(
        self, method: Callable[[Any], Any], kind: Any
    ) -> Callable[[bytes, Any], bytes]:
        def answer(content: bytes, context: Any) -> Any:
            # Parsed here: gRPC would log each request that is none.
            code = grpc.StatusCode.INVALID_ARGUMENT
            try:
                found = method(protocol.parsed(kind, content))
                self.counts["requests"] += 1
                return found.SerializeToString()
            except protocol.BadAnswerError as error:
                reason = str(error)
            except _RefusedError as error:
                code, reason = error.code, str(error)
            except tf.errors.OpError as error:
                reason = error.message
            self.counts["failed"] += 1
            context.abort(code, reason)

        return answer

    def _predict(self, request: Any) -> Any:
        with self._followed.current() as copy:
            copy, specs = self._checked(request.model_spec, copy)
            inputs = _inputs(request, specs.input_spec)
            wanted = {*request.output_filter} or {*specs.output_spec}
            if unknown := wanted - {*specs.output_spec}:
                raise _RefusedError(
                    f"The outputs are {sorted(specs.output_spec)}; asked for "
                    f"{sorted(unknown)[:10]}."
                )
            names = student_graph.leaf_names(specs.output_spec, "outputs")
            found = zip(names, copy.function(inputs), strict=True)
            outputs = {name: t.numpy() for name, t in found if name in wanted}
            return protocol.answer(self._model, copy.version, outputs)

    def _metadata(self, request: Any) -> Any:
        with self._followed.current() as copy:
            copy, specs = self._checked(request.model_spec, copy)
            signature = protocol.Signature(
                inputs=specs.input_spec, outputs=specs.output_spec
            )
            return protocol.metadata(self._model, copy.version, signature)

    def _checked(self, spec: Any, copy: _Copy | None) -> tuple[_Copy, _Specs]:
        """Returns the version and its specs, if it is the one asked about."""
        if spec.name != self._model:
            raise _RefusedError(
                f"The model must be {self._model!r}; received {spec.name!r}.",
                grpc.StatusCode.NOT_FOUND,
            )
        specs = self._followed.specs
        if copy is None or specs is None:
            raise _RefusedError(
                "The group has published no good version yet.",
                grpc.StatusCode.UNAVAILABLE,
            )
        wanted = spec.version.value if spec.HasField("version") else None
        if spec.version_label or wanted not in (None, copy.version):
            raise _RefusedError(
                f"Only version {copy.version} is served; received "
                f"{spec.version_label or wanted!r}.",
                grpc.StatusCode.NOT_FOUND,
            )
        if spec.signature_name not in ("", protocol.SIGNATURE):
            raise _RefusedError(
                f"The signature must be {protocol.SIGNATURE!r}; received "
                f"{spec.signature_name!r}.",
            )
        return copy, specs


def _inputs(request: Any, specs: protocol.Specs) -> dict[str, np.ndarray]:
    """Returns a request's inputs, checked by the signature."""
    if set(request.inputs) != set(specs):
        raise _RefusedError(
            f"The inputs must be {sorted(specs)}; received "
            f"{sorted(request.inputs)[:10]}."
        )
    inputs = {}
    for name, spec in specs.items():
        proto = request.inputs[name]
        if proto.dtype != spec.dtype.as_datatype_enum:
            raise _RefusedError(
                f"The input {name!r} must be {spec.dtype.name}; received "
                f"the dtype number {proto.dtype}."
            )
        try:
            inputs[name] = protocol.array(proto, spec.shape)
        except protocol.BadAnswerError as error:
            raise _RefusedError(f"The input {name!r}: {error}") from error
    rows = {len(values) for values in inputs.values()}
    if len(rows) != 1:
        raise _RefusedError(
            f"All inputs must have as many rows; received {rows}."
        )
    return inputs
