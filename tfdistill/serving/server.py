"""Answers PredictionService's requests by gRPC, and `/healthz` by HTTP."""

import http.server
import json
import statistics
import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import grpc
import numpy as np
import tensorflow as tf

from tfdistill.labels import protocol
from tfdistill.serving import followed as followed_lib

# Requests that may wait for a thread, for each one that has one.
_WAITING = 16
_STOP_SECS = 5.0


class Load:
    """What was asked since the last look, from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._secs: list[float] = []
        self._num_rows = self._num_failed = 0

    def add(self, rows: int, secs: float) -> None:
        """Counts a request that was answered."""
        with self._lock:
            self._secs.append(secs)
            self._num_rows += rows

    def add_failed(self) -> None:
        """Counts a request that was not."""
        with self._lock:
            self._num_failed += 1

    def take(self) -> dict[str, Any]:
        """Returns the counts, which begin again."""
        with self._lock:
            secs, self._secs = self._secs, []
            rows, self._num_rows = self._num_rows, 0
            failed, self._num_failed = self._num_failed, 0
        return {
            "requests": len(secs),
            "rows": rows,
            "failed": failed,
            "latency_ms": round(1e3 * statistics.median(secs), 3)
            if secs
            else None,
            "max_latency_ms": round(1e3 * max(secs), 3) if secs else None,
        }


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
        port: Of gRPC.
        health_port: Of HTTP.
        load: What was asked.
    """

    def __init__(
        self,
        followed: followed_lib.Followed,
        *,
        model: str = "default",
        host: str = "127.0.0.1",
        port: int = 0,
        health_port: int = 0,
        num_threads: int = 4,
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        """Listens, on any free port where one is 0; OSError if one is taken.

        `credentials` are those of TLS, for gRPC alone.
        """
        self.load = Load()
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
        self._http = http.server.ThreadingHTTPServer(
            (host, health_port), _handler(self._health)
        )
        self.health_port = self._http.server_address[1]

    def start(self) -> None:
        """Starts to answer, in threads."""
        self._grpc.start()
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def stop(self) -> None:
        """Answers what was asked, for 5 s at most, and closes the ports."""
        self._grpc.stop(_STOP_SECS).wait()
        self._http.shutdown()
        self._http.server_close()

    def _answering(
        self, method: Callable[[Any], Any], kind: Any
    ) -> Callable[[bytes, Any], bytes]:
        def answer(content: bytes, context: Any) -> Any:
            # Parsed here: gRPC would log each request that is none.
            try:
                request = protocol.parsed(kind, content)
                return method(request).SerializeToString()
            except protocol.BadAnswerError as error:
                self.load.add_failed()
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            except _RefusedError as error:
                self.load.add_failed()
                context.abort(error.code, str(error))
            except tf.errors.OpError as error:
                self.load.add_failed()
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)

        return answer

    def _predict(self, request: Any) -> Any:
        begin = time.perf_counter()
        with self._followed.current() as served:
            served = self._checked(request.model_spec, served)
            inputs, rows = self._inputs(request, served)
            unknown = {*request.output_filter} - {*served.signature.outputs}
            if unknown:
                raise _RefusedError(
                    f"The outputs are {sorted(served.signature.outputs)}; "
                    f"asked for {sorted(unknown)[:10]}."
                )
            outputs = {
                name: tensor.numpy()
                for name, tensor in served.predict(inputs).items()
                if not request.output_filter or name in request.output_filter
            }
            answer = protocol.answer(self._model, served.version, outputs)
        self.load.add(rows, time.perf_counter() - begin)
        return answer

    def _metadata(self, request: Any) -> Any:
        with self._followed.current() as served:
            served = self._checked(request.model_spec, served)
            return protocol.metadata(
                self._model, served.version, served.signature
            )

    def _checked(
        self, spec: Any, served: followed_lib.Served | None
    ) -> followed_lib.Served:
        if spec.name != self._model:
            raise _RefusedError(
                f"The model must be {self._model!r}; received {spec.name!r}.",
                grpc.StatusCode.NOT_FOUND,
            )
        if served is None:
            raise _RefusedError(
                "The group has published no good version yet.",
                grpc.StatusCode.UNAVAILABLE,
            )
        wanted = spec.version.value if spec.HasField("version") else None
        if spec.version_label or wanted not in (None, served.version):
            raise _RefusedError(
                f"Only version {served.version} is served; received "
                f"{spec.version_label or wanted!r}.",
                grpc.StatusCode.NOT_FOUND,
            )
        if spec.signature_name not in ("", protocol.SIGNATURE):
            raise _RefusedError(
                f"The signature must be {protocol.SIGNATURE!r}; received "
                f"{spec.signature_name!r}.",
            )
        return served

    def _inputs(
        self, request: Any, served: followed_lib.Served
    ) -> tuple[dict[str, np.ndarray], int]:
        """Returns the inputs, checked by the signature, and their rows."""
        specs = served.signature.inputs
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
        return inputs, rows.pop()

    def _health(self) -> tuple[bool, bytes]:
        version = self._followed.version
        found = {"serving": version >= 0, "version": version}
        return version >= 0, json.dumps(found).encode() + b"\n"


def _handler(health: Callable[[], tuple[bool, bytes]]) -> Any:
    class Health(http.server.BaseHTTPRequestHandler):
        # A client that says nothing does not hold its thread for ever.
        timeout = 10.0

        def do_GET(self) -> None:  # As http.server names it.
            is_good, body = health()
            code = 200 if is_good else 503
            if self.path != "/healthz":
                code, body = 404, b"Only /healthz is here.\n"
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing: it is asked every few seconds."""

    return Health
