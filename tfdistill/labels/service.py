"""Soft targets from servers, asked for while the data are read.

Any server of TensorFlow Serving's PredictionService will do: its own, pointed
at a group's directory of an exchange, or `tfdistill teach`.
"""

import collections
import itertools
import logging
import math
import threading
import time
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np
import tensorflow as tf

from tfdistill.exports import student_graph
from tfdistill.labels import attached
from tfdistill.labels import forms
from tfdistill.labels import protocol
from tfdistill.system import background
from tfdistill.system import untrusted

_KINDS = {
    grpc.StatusCode.UNAVAILABLE: "unreachable",
    grpc.StatusCode.DEADLINE_EXCEEDED: "slow",
    grpc.StatusCode.INTERNAL: "malformed",
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
# The longest pause of a server that fails, in batches' times.
_LONGEST_PAUSE_FACTOR = 32
_log = logging.getLogger(__name__)


class TeacherClient:
    """Attaches servers' predictions to each batch.

    Pass it to `dataset.map`, after `batch`. It asks one server a batch, all of
    them in turn, and another one if that fails. The training never waits longer
    than `timeout_secs` for a batch, and continues without servers: rows without
    an answer have version -1 and teach nothing. A server that fails gets no
    requests for `timeout_secs`, and for twice as long after each further
    failure; while no server is left, batches pass at once.

    `num_parallel_calls` of `dataset.map` is how many batches are asked about
    at once, and `prefetch` how many answers wait for the training, which
    makes them older. The Python code runs in the process that creates the
    data set: each worker of a `MultiWorkerMirroredStrategy`, the chief of a
    parameter-server group. There, pass `fit` a function that creates the data
    set.

    Example:
        ```python
        teachers = tfdistill.labels.TeacherClient(
            ["host1:8500", "host2:8500"], {"outputs": [10]}
        )
        dataset = dataset.map(teachers, num_parallel_calls=4).prefetch(4)
        model = tfdistill.CodistillModel(
            student, teachers=tfdistill.teachers.LabelTeacher(teachers)
        )
        ```
    """

    def __init__(
        self,
        addresses: Sequence[str],
        outputs: Mapping[str, Sequence[int]],
        *,
        name: str = "served",
        model: str = "default",
        timeout_secs: float = 0.5,
        max_age_steps: int | None = None,
        credentials: object = None,
    ) -> None:
        """Connects when the first batch is asked about.

        Args:
            addresses: `host:port` of each server, at least one. They need not
                be there yet.
            outputs: The shape of each of the model's outputs without the batch,
                by name, in the order of the student's; float32. A version of
                a student with one output calls it "outputs".
            name: Name of the teacher, as in `teachers.LabelTeacher(name)`.
            model: The model's name at the servers.
            timeout_secs: Longest time for one batch, tries at other servers
                included, > 0. Default 0.5.
            max_age_steps: Labels aren't used once the student's step is more
                than this beyond the version that answered. Default: no bound.
            credentials: `grpc.ChannelCredentials` for TLS. Default: none.

        Raises:
            ValueError: An argument is not as above.
        """
        if isinstance(addresses, str) or not addresses:
            raise ValueError(
                "`addresses` must be a list of one or more host:port; received "
                f"{addresses!r}."
            )
        if not 0 < timeout_secs < math.inf:
            raise ValueError(
                "`timeout_secs` must be > 0 and finite; received "
                f"{timeout_secs!r}."
            )
        if max_age_steps is not None and max_age_steps < 0:
            raise ValueError(
                "`max_age_steps` must be a whole number >= 0, or None; "
                f"received {max_age_steps!r}."
            )
        self.name = name
        self._model = model
        self._timeout_secs, self._max_age_steps = timeout_secs, max_age_steps
        self._turn = itertools.count()
        self._servers = [
            _Server(address, timeout_secs, credentials) for address in addresses
        ]
        self._lock = threading.Lock()
        # Batches and rows, and those without an answer; bad answers by kind.
        self._counts: collections.Counter[str] = collections.Counter()
        self._refused: collections.Counter[str] = collections.Counter()
        self._outputs = {name: list(shape) for name, shape in outputs.items()}

    def __call__(self, *element: object) -> Any:
        """Adds labels to an element, for `dataset.map`.

        Args:
            *element: `x`, or `(x, y)`, or `(x, y, sample_weight)`: a batch,
                whose inputs have the names that the model has for them. Floats
                are sent as float32.

        Returns:
            The element as `teachers.LabelTeacher` takes it.
        """
        whole = element[0] if len(element) == 1 else element
        bare, _ = attached.detach(whole)
        flat = _named(bare[0] if isinstance(bare, tuple) else bare)
        names = list(flat)

        def ask(*arrays: np.ndarray) -> list[np.ndarray]:
            return self._labels(dict(zip(names, arrays, strict=True)))

        # Stateless for TensorFlow, or iterators could not be saved.
        version, *outputs = tf.numpy_function(
            ask,
            list(flat.values()),
            [tf.int64, *[tf.float32] * len(self._outputs)],
            stateful=False,
        )
        batch = next(iter(flat.values())).shape[0]
        version.set_shape([batch])
        for tensor, shape in zip(outputs, self._outputs.values(), strict=True):
            tensor.set_shape([batch, *shape])
        most = self._max_age_steps
        label = attached.label(
            map(forms.Form().encode, outputs),
            version=version,
            expires_step=None if most is None else version + most,
        )
        return attached.attach(whole, {self.name: label})

    def status(self) -> dict[str, Any]:
        """Returns what was asked, answered and refused so far.

        Returns:
            `{"name", "batches", "absent_batches", "rows", "absent_rows",
            "refused", "servers"}`: `refused` counts bad answers by kind, and
            `servers` has for each its address, whether it is `usable` or left
            alone, its newest `version`, its good `answers`, and its last
            `problem`.
        """
        names = ("batches", "absent_batches", "rows", "absent_rows")
        with self._lock:
            return {
                "name": self.name,
                **{name: self._counts[name] for name in names},
                "refused": dict(self._refused),
                "servers": [
                    {
                        "address": server.address,
                        "usable": server.pause.is_over,
                        "version": server.version,
                        "answers": server.num_answers,
                        "problem": untrusted.one_line(server.problem),
                    }
                    for server in self._servers
                ],
            }

    def __deepcopy__(self, memo: dict[int, Any]) -> "TeacherClient":
        """Returns itself: what is copied asks by the same connections."""
        return self

    def close(self) -> None:
        """Ends all connections; batches then pass without labels."""
        for server in self._servers:
            server.channel.close()
        self._servers = []

    # ---- in the threads of the input pipeline ----

    def _labels(self, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Asks about a batch: the version, then the outputs."""
        rows = len(next(iter(inputs.values())))
        expected = {
            name: tf.TensorSpec([rows, *shape], tf.float32)
            for name, shape in self._outputs.items()
        }
        found = self._asked(inputs, expected)
        with self._lock:
            self._counts.update(batches=1, rows=rows)
            if found is None:
                self._counts.update(absent_batches=1, absent_rows=rows)
        version, outputs = found or (
            -1,
            [np.zeros(spec.shape, np.float32) for spec in expected.values()],
        )
        return [np.full([rows], version, np.int64), *outputs]

    def _asked(
        self, inputs: Mapping[str, np.ndarray], expected: protocol.Specs
    ) -> tuple[int, list[np.ndarray]] | None:
        """Asks one server after the other; None if none has answered."""
        servers = self._servers
        start = next(self._turn) % max(len(servers), 1)
        order = [*servers[start:], *servers[:start]]
        left = [server for server in order if server.pause.is_over]
        if not left:
            return None
        question = protocol.question(self._model, inputs)
        deadline = time.monotonic() + self._timeout_secs
        while left:
            # Time that this server does not use is left for the others.
            share = (deadline - time.monotonic()) / len(left)
            server = left.pop(0)
            if share <= 0:
                break
            try:
                response = server.stub.Predict(question, timeout=share)
                answer = protocol.read_answer(response, expected)
            # ValueError: not an answer, or gRPC's for a closed channel.
            except (grpc.RpcError, ValueError) as error:
                self._refuse(server, error)
                continue
            with self._lock:
                server.pause.succeeded()
                server.version = max(server.version, answer[0])
                server.num_answers += 1
            return answer
        return None

    def _refuse(self, server: "_Server", error: Exception) -> None:
        kind, reason = "refused", str(error)
        if isinstance(error, untrusted.BadMessageError):
            kind = error.kind
        elif isinstance(error, grpc.RpcError):
            kind = _KINDS.get(error.code(), kind)
            reason = f"{error.code().name}: {error.details()}"
        with self._lock:
            server.problem = reason
            # Simultaneous questions that fail count as one failure.
            if server.pause.is_over:
                server.pause.failed()
            self._refused[kind] += 1
            is_first = self._refused[kind] == 1
        if is_first:
            _log.warning(
                "Rejected an answer from %s at %s (%s): %s It gets no requests "
                "for a while; training continues. Later cases are only "
                "counted, in TeacherClient.status().",
                self.name,
                server.address,
                kind,
                untrusted.one_line(reason),
            )


class _Server:
    """One server: its connection, and what came of it; under a lock."""

    def __init__(
        self, address: str, pause_secs: float, credentials: object
    ) -> None:
        """Connects when it is asked first."""
        self.address = address
        self.version, self.num_answers, self.problem = -1, 0, ""
        # It is left alone for a batch's time after a failure, and for longer
        # if it fails again, so that a frozen one costs hardly any time.
        self.pause = background.Backoff(
            first_secs=pause_secs,
            longest_secs=_LONGEST_PAUSE_FACTOR * pause_secs,
        )
        self.channel = (
            grpc.secure_channel(address, credentials, _OPTIONS)
            if credentials
            else grpc.insecure_channel(address, _OPTIONS)
        )
        self.stub = protocol.Stub(self.channel)


def _named(x: object) -> dict[str, tf.Tensor]:
    """Returns inputs by the names and in the dtypes of versions."""
    named = student_graph.named(x, "inputs")
    for name, tensor in named.items():
        if not isinstance(tensor, tf.Tensor) or not tensor.shape.rank:
            raise ValueError(
                "Inputs sent to servers must be dense tensors [batch, ...]; "
                f"received {name}={tensor!r}. Batch the data set first, and "
                "pass the teachers to its `map`."
            )
        if tensor.dtype.is_floating:
            named[name] = tf.cast(tensor, tf.float32)
    return named
