"""Servers of predictions inside a test's process: good ones and bad ones."""

import contextlib
import pathlib
import socket
import subprocess
import threading
from collections.abc import Callable
from collections.abc import Iterator
from concurrent import futures

import grpc
import tensorflow as tf
from tensorflow_serving.apis import predict_pb2

from tests.cases import free_ports
from tests.cases import waits
from tfdistill.serving import server as server_lib

WAIT_SECS = 60.0


def certificate(directory: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Makes a key and a certificate of 127.0.0.1, signed by itself."""
    key, made = directory / "key.pem", directory / "cert.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-nodes", "-days", "1"),
            *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(made)),
        ],
        check=True,
        capture_output=True,
        timeout=WAIT_SECS,
    )
    return key, made


@contextlib.contextmanager
def serving(exchange, *, group=1, wait=True, port=0, **options) -> Iterator:
    """Our server over an exchange; waits for a first version."""
    followed = server_lib.Followed(exchange, group, **options)
    server = server_lib.Server(followed, port=port)
    server.followed = followed
    server.address = f"127.0.0.1:{server.port}"
    followed.start()
    server.start()
    try:
        if wait:
            waits.until(lambda: followed.version >= 0)
        yield server
    finally:
        server.stop()
        followed.stop()


@contextlib.contextmanager
def scripted(answer: Callable[[predict_pb2.PredictRequest], bytes]) -> Iterator:
    """A server that answers Predict with any bytes; gives its address."""
    server = grpc.server(futures.ThreadPoolExecutor(4))
    method = grpc.unary_unary_rpc_method_handler(
        lambda request, _: answer(request),
        request_deserializer=predict_pb2.PredictRequest.FromString,
    )
    server.add_generic_rpc_handlers(
        [
            grpc.method_handlers_generic_handler(
                "tensorflow.serving.PredictionService", {"Predict": method}
            )
        ]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def response(version=10, **outputs) -> bytes:
    """A PredictResponse's bytes; `version=None` names none."""
    made = predict_pb2.PredictResponse()
    if version is not None:
        made.model_spec.version.value = version
    for name, values in outputs.items():
        made.outputs[name].CopyFrom(tf.make_tensor_proto(values))
    return made.SerializeToString()


@contextlib.contextmanager
def raw(says: bytes = b"") -> Iterator[str]:
    """Takes connections, says some bytes, and then nothing; its address."""
    (port,) = free_ports.find(1)
    listener = socket.create_server(("127.0.0.1", port))
    connections = []

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connections.append(connection)
                connection.sendall(says)

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(WAIT_SECS)
        for connection in connections:
            connection.close()
