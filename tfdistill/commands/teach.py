"""The command `tfdistill teach`."""

import json
import logging
import os
import pathlib
import signal
import threading
import time
from typing import Any

from tfdistill.system import programs

_log = logging.getLogger(__name__)
# Between two warnings that there is nothing to serve.
_WARN_SECS = 30.0
_NOTES = """\
The protocol is TensorFlow Serving's PredictionService (Predict and
GetModelMetadata). Use tfdistill.labels.TeacherClient or any TensorFlow Serving
client. Signatures of versions are checked with the run's key
(TFDISTILL_EXCHANGE_KEY_FILE). The server prints its load every second, as a
line of JSON. After SIGTERM, it answers pending requests and ends. See
docs/labels.md.
"""


def _add_options(options: programs.Program) -> None:
    add = options.add
    add("exchange", "<DIR>: exchange of the run, or its URL", required=True)
    add("group", "group whose student is served", 0)
    add("port", "gRPC port; 0 for any free port", 8500)
    add("host", "address to listen on; 0.0.0.0 for all", "127.0.0.1")
    add("model_name", "name that clients request", "default")
    add("tls_key", "<FILE>: private key, PEM; clients then need TLS")
    add("tls_cert", "<FILE>: certificate of the key and its chain, PEM")
    add("trust_graph", "load a graph even if it isn't known to be safe", False)


def _credentials(options: programs.Options) -> Any:
    names = options.tls_key, options.tls_cert
    if names == (None, None):
        return None
    if None in names:
        raise ValueError("--tls-key and --tls-cert must come together")
    import grpc

    key, certificate = (pathlib.Path(name).read_bytes() for name in names)
    return grpc.ssl_server_credentials([(key, certificate)])


def _run(options: programs.Options) -> int:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if options.group < 0 or not 0 <= options.port < 65536:
        raise programs.UsageError(
            "--group must be >= 0 and --port from 0 to 65535; received "
            f"{options.group} and {options.port}."
        )
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    # Only here: --help is answered without TensorFlow.
    from tfdistill.exchange import publisher
    from tfdistill.serving import server as server_lib

    with programs.usage_errors():
        followed = server_lib.Followed(
            publisher.Exchange(options.exchange),
            options.group,
            trust_graph=options.trust_graph,
        )
        server = server_lib.Server(
            followed,
            model=options.model_name,
            host=options.host,
            port=options.port,
            credentials=_credentials(options),
        )
    begin = time.process_time()

    def report() -> None:
        record = {
            "time": round(time.time(), 3),
            "version": followed.version,
            "refused_versions": followed.num_refused,
            "read_bytes": followed.num_bytes,
            "process_seconds": round(time.process_time() - begin, 3),
            "port": server.port,
            **server.counts,
        }
        print(json.dumps(record), flush=True)

    followed.start()
    server.start()
    due = 0.0
    while not stopping.wait(1.0):
        report()
        if followed.version < 0 and time.monotonic() >= due:
            _log.warning(
                "Nothing to serve: group %d of %s has no usable version (%d "
                "refused). Requests fail until there is a usable version; "
                "check --exchange and --group, or run tfdistill doctor.",
                options.group,
                options.exchange,
                followed.num_refused,
            )
            due = time.monotonic() + _WARN_SECS
    server.stop()
    followed.stop()
    report()
    return 0


PROGRAM = programs.Program(
    name="tfdistill teach",
    about="Serves the newest version of a group as a teacher.",
    notes=_NOTES,
    define=_add_options,
    run=_run,
)
main = PROGRAM.main
