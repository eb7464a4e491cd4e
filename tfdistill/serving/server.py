"""Answers PredictionService's requests about the newest version of a group.

One request runs at a time, on all cores, and new values are put in place
between two of them: no answer mixes two versions, and no version costs a load.
"""

import collections
import logging
import threading
from collections.abc import Callable
from collections.abc import Mapping
from concurrent import futures
from typing import Any
from typing import NamedTuple

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
from tfdistill.system import untrusted

# Requests that may wait for those before them.
_WAITING = 64
_STOP_SECS = 5.0
_log = logging.getLogger(__name__)


class _Signature(NamedTuple):
    """What a model takes and returns, by name; the batch dimension is None."""

    input_spec: protocol.Specs
    output_spec: protocol.Specs


def _signature(version: versions.Version) -> _Signature:
    """What a version takes and returns, by its manifest."""
    said = version.manifest
    return _Signature(_specs(said.inputs), _specs(said.outputs))


def _specs(described: Mapping[str, Mapping[str, Any]]) -> protocol.Specs:
    return {
        name: tf.TensorSpec(leaf["shape"], tf.as_dtype(leaf["dtype"]), name)
        for name, leaf in described.items()
    }


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
        """Reads nothing yet.

        Args:
            exchange: Where the group publishes.
            group: The group that is followed.
            trust_graph: Whether to load graphs that hold anything.
        """
        # Counts of the versions that were read.
        self.num_refused = self.num_bytes = 0
        # The first version's schema; all others must have the same.
        self._schema: Any = {}
        self._exchange = exchange
        self._trust_graph = trust_graph
        # The step of the version that answers now, or -1, and its graph. All
        # versions must take and return what it does.
        self.version = -1
        self.function: other_graphs.FrozenFunction | None = None
        self._fingerprint = ""
        # Held by requests, so that all of one is of one version.
        self.lock = threading.Lock()
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

    def start(self) -> None:
        """Starts to look for versions, in a thread."""
        self._following.start()

    def stop(self) -> None:
        """Ends that thread."""
        self._following.stop()

    def _screen(self, version: versions.Version) -> None:
        specs = self.function or _signature(version)
        screen_lib.check(version, specs=specs, schema=self._schema)

    def _read(
        self, version: versions.Version
    ) -> tuple[other_graphs.FrozenFunction, saved_model.Snapshot]:
        """Returns a version's graph, which may be in use, and its values."""
        found = version.manifest
        variables = saved_model.in_order(found.variables)
        values = saved_model.read_variables(version.path, variables)
        function = self.function
        if (
            function is None
            or found.graph_fingerprint != self._fingerprint
            or not function.fits(values)
        ):
            function = other_graphs.load_version(
                self._exchange,
                version,
                function or _signature(version),
                trust=self._trust_graph,
            )
        function.check(values)
        return function, values

    def _swap(self) -> None:
        if self._follower.state == follower.FAILED:
            self._follower.reject(self._follower.announced)
            self.num_refused += 1
        elif self._follower.state == follower.READY:
            taken = self._follower.take_staged()
            version, (function, values) = taken.version, taken.values
            if self.function is None:
                extras = version.manifest.extras
                self._schema = extras.get(screen_lib.SCHEMA_FIELD)
            self.num_bytes += version.num_bytes
            self._fingerprint = version.manifest.graph_fingerprint
            with self.lock:
                function.install(values)
                self.function, self.version = function, version.step
            _log.info("Serving version %d.", version.step)


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
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        """Listens, on any free port if it is 0; OSError if it is taken.

        `credentials` are for TLS.
        """
        self.counts = collections.Counter(requests=0, failed=0)
        self._followed = followed
        self._model = model
        self._grpc = grpc.server(
            futures.ThreadPoolExecutor(1),
            maximum_concurrent_rpcs=_WAITING,
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
                f"{host}:{port} must be free, and the TLS key must match its "
                f"certificate: {error}"
            ) from error

    def start(self) -> None:
        """Starts to answer, in threads."""
        self._grpc.start()

    def stop(self) -> None:
        """Answers what was asked, for 5 s at most, and closes the port."""
        self._grpc.stop(_STOP_SECS).wait()

    def Predict(self, request: object, context: object) -> Any:
        """Answers PredictionService's request of this name."""
        return self._answered(self._predicted, request, context)

    def GetModelMetadata(self, request: object, context: object) -> Any:
        """Answers PredictionService's request of this name: the signature."""
        return self._answered(self._described, request, context)

    def _answered(
        self,
        give: Callable[[Any, Any], Any],
        request: object,
        context: grpc.ServicerContext,
    ) -> Any:
        """Gives an answer, of one version, and counts; a bad request ends."""
        outcome = "failed"
        try:
            with self._followed.lock:
                answer = give(request, context)
            outcome = "requests"
            return answer
        except (untrusted.BadMessageError, tf.errors.OpError) as error:
            return context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            self.counts[outcome] += 1

    def _predicted(self, request: Any, context: grpc.ServicerContext) -> Any:
        function = self._found(request.model_spec, context)
        inputs = protocol.arrays(request.inputs, function.input_spec)
        shapes = {name: array.shape for name, array in inputs.items()}
        if len({shape[:1] for shape in shapes.values()}) > 1:
            raise untrusted.BadMessageError(
                "shape",
                "All inputs must have the same number of rows; received "
                f"{shapes}.",
            )
        names = student_graph.leaf_names(function.output_spec, "outputs")
        outputs = zip(names, function(inputs), strict=True)
        version = self._followed.version
        return protocol.answer(self._model, version, dict(outputs))

    def _described(self, request: Any, context: grpc.ServicerContext) -> Any:
        function = self._found(request.model_spec, context)
        return protocol.metadata(
            self._model,
            self._followed.version,
            function.input_spec,
            function.output_spec,
        )

    def _found(self, spec: Any, context: grpc.ServicerContext) -> Any:
        """Returns what was asked about; ends the request if it is not there."""
        function, version = self._followed.function, self._followed.version
        if function is None:
            context.abort(
                grpc.StatusCode.UNAVAILABLE,
                "The group hasn't published a good version yet.",
            )
        served = self._model, version, "", protocol.SIGNATURE
        asked = (
            spec.name,
            spec.version.value if spec.HasField("version") else version,
            spec.version_label,
            spec.signature_name or protocol.SIGNATURE,
        )
        if asked != served:
            context.abort(
                grpc.StatusCode.NOT_FOUND,
                "Model, version, its label and signature must be "
                f"{served}; received {asked}.",
            )
        return function
