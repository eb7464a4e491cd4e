"""Soft targets from servers, asked for while the data are read.

Any server of TensorFlow Serving's PredictionService will do: its own, pointed
at a group's directory of an exchange, or `tfdistill-teach`.
"""

import itertools
import logging
import math
import threading
import time
import weakref
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistill.exports import other_graphs
from tfdistill.exports import student_graph
from tfdistill.labels import attached
from tfdistill.labels import forms
from tfdistill.labels import protocol
from tfdistill.labels import servers as servers_lib
from tfdistill.system import untrusted

_log = logging.getLogger(__name__)
_POLL_SECS = 0.2


class Teachers:
    """Attaches to each batch what servers' models predict for it.

    Pass it to `dataset.map`, after `batch`. It asks one server a batch, all of
    them in turn, and another one if that fails. The training never waits
    longer than `timeout_secs` for a batch, and never fails for want of
    servers: rows without an answer have version -1 and teach nothing. A server
    that fails is left alone for 0.1 s, and longer each time; if all are,
    batches pass at once.

    `num_parallel_calls` of `dataset.map` is how many batches are asked about
    at once, and `prefetch` how many answers wait for the training, which
    makes them older. The Python code runs in the process that creates the
    data set: each worker of a `MultiWorkerMirroredStrategy`, the chief of a
    parameter-server group. There, pass `fit` a function that creates the data
    set.

    Example:
        ```python
        teachers = tfdistill.labels.Teachers(
            ["host1:8500", "host2:8500"], max_age_steps=1000
        )
        dataset = dataset.map(teachers, num_parallel_calls=4).prefetch(4)
        model = tfdistill.CodistillModel(
            student, tfdistill.TeacherSet(labels=[teachers])
        )
        ```
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        name: str = "served",
        model: str = "default",
        top_k: int | None = None,
        num_samples: int | None = None,
        dtype: str = "float32",
        from_logits: bool = True,
        timeout_secs: float = 0.5,
        max_age_steps: int | None = None,
        max_age_secs: float | None = None,
        outputs: Mapping[str, Sequence[int | None]] | None = None,
        wait_secs: float = 60.0,
        longest_pause_secs: float = 30.0,
        seed: int = 0,
        credentials: Any = None,
    ) -> None:
        """Asks the servers what the model takes and returns.

        Args:
            addresses: `host:port` of each server, at least one.
            name: Of the teacher, as `TeacherSet(labels=[name])` has it.
            model: The model's name at the servers.
            top_k: Keep only so many of the likeliest classes; see
                `forms.Form`. Default: all.
            num_samples: Keep so many classes drawn by their probability.
            dtype: What is kept is float32, or float16 for half the memory.
            from_logits: Whether outputs are logits, not probabilities.
            timeout_secs: Longest time for one batch, tries at other servers
                included, > 0. Default 0.5.
            max_age_steps: A label does not count once the student's step is so
                many beyond the version that answered. Default: no bound.
            max_age_secs: Nor so many seconds after the answer. Default: no
                bound.
            outputs: Each output's shape without the batch, by name, in the
                order of the student's; float32. Servers then need not be
                there yet. Default: servers are asked.
            wait_secs: Longest wait for the first server that says what its
                model takes and returns. Default 60.
            longest_pause_secs: A server that fails again and again is left
                alone for at most so long, >= 0.1. Default 30.
            seed: Decides which classes are drawn. Default 0.
            credentials: `grpc.ChannelCredentials` for TLS. Default: none.

        Raises:
            ImportError: tensorflow-serving-api is not installed.
            ValueError: An argument is not as above.
            RuntimeError: No server has answered in `wait_secs`.
        """
        _check(addresses, timeout_secs, max_age_steps, max_age_secs)
        if not 0.1 <= longest_pause_secs < math.inf:
            raise ValueError(
                "`longest_pause_secs` must be >= 0.1 and finite; received "
                f"{longest_pause_secs!r}."
            )
        self.name = name
        self._model = model
        self._form = forms.Form(
            top_k=top_k,
            num_samples=num_samples,
            dtype=dtype,
            from_logits=from_logits,
        )
        self._timeout_secs = timeout_secs
        self._max_age_steps = max_age_steps
        self._max_age_secs = max_age_secs
        self._servers = [
            servers_lib.Server(
                address,
                model,
                credentials=credentials,
                probe_secs=timeout_secs,
                longest_pause_secs=longest_pause_secs,
            )
            for address in addresses
        ]
        self._finalizer = weakref.finalize(self, _close, self._servers)
        self._turn = itertools.count()
        self._draws = itertools.count()
        self._seed = seed
        self._lock = threading.Lock()
        self._refused: dict[str, int] = {}
        self._num_batches = self._num_absent_batches = 0
        self._num_rows = self._num_absent_rows = 0
        self._is_checked = False
        self._inputs: protocol.Specs | None = None
        if outputs is None:
            signature = self._wait(wait_secs)
            self._inputs = signature.inputs
            self._outputs = {
                name: signature.outputs[name]
                for name in other_graphs.in_flat_order(signature.outputs)
            }
        else:
            self._outputs = {
                name: tf.TensorSpec([None, *shape], tf.float32)
                for name, shape in outputs.items()
            }
        for output, spec in self._outputs.items():
            if not spec.shape.rank or not spec.dtype.is_floating:
                raise ValueError(
                    "A teacher's outputs must be floats [batch, ...]; the "
                    f"model's {output!r} is {spec.dtype.name} {spec.shape}."
                )

    def __call__(self, *element: Any) -> Any:
        """Adds labels to an element, for `dataset.map`.

        Args:
            *element: `x`, or `(x, y)`, or `(x, y, sample_weight)`: a batch.

        Returns:
            The element as `TeacherSet(labels=...)` takes it.
        """
        whole = element[0] if len(element) == 1 else element
        bare, _ = attached.detach(whole)
        x = bare[0] if isinstance(bare, tuple) else bare
        flat = self._named(x)
        names = list(flat)

        def ask(*arrays: np.ndarray) -> list[np.ndarray]:
            return self._labels(dict(zip(names, arrays, strict=True)))

        # Stateless for TensorFlow, or iterators could not be saved.
        version, answered, seed, *outputs = tf.numpy_function(
            ask,
            list(flat.values()),
            [
                tf.int64,
                tf.float64,
                tf.int32,
                *[tf.float32] * len(self._outputs),
            ],
            stateful=False,
        )
        batch = next(iter(flat.values())).shape[0]
        for tensor in (version, answered):
            tensor.set_shape([batch])
        seed.set_shape([2])
        for tensor, spec in zip(outputs, self._outputs.values(), strict=True):
            tensor.set_shape([batch, *spec.shape[1:]])
        expires: dict[str, Any] = {}
        if self._max_age_steps is not None:
            expires["expires_step"] = version + self._max_age_steps
        if self._max_age_secs is not None:
            expires["expires_secs"] = answered + self._max_age_secs
        kept = [
            self._form.encode(output, seed=seed + [0, number])
            for number, output in enumerate(outputs)
        ]
        label = attached.label(kept, version=version, **expires)
        return attached.attach(whole, {self.name: label})

    def status(self) -> dict[str, Any]:
        """Returns what was asked, answered and refused so far.

        Returns:
            `{"name", "batches", "absent_batches", "rows", "absent_rows",
            "refused", "servers"}`: `refused` counts bad answers by kind, and
            `servers` has for each its address, whether it is `usable` or left
            alone, its newest `version`, its good `answers`, the `sent_bytes`
            of questions and the `received_bytes` of answers, and its last
            `problem`.
        """
        with self._lock:
            return {
                "name": self.name,
                "batches": self._num_batches,
                "absent_batches": self._num_absent_batches,
                "rows": self._num_rows,
                "absent_rows": self._num_absent_rows,
                "refused": dict(self._refused),
                "servers": [
                    {
                        "address": server.address,
                        "usable": server.is_usable,
                        "version": server.version,
                        "answers": server.num_answers,
                        "sent_bytes": server.sent_bytes,
                        "received_bytes": server.received_bytes,
                        "problem": untrusted.one_line(server.problem),
                    }
                    for server in self._servers
                ],
            }

    def __deepcopy__(self, memo: Any) -> "Teachers":
        """Returns itself: what is copied asks by the same connections."""
        return self

    def close(self) -> None:
        """Ends all connections; batches then pass without labels."""
        self._finalizer()
        self._servers = []

    def _wait(self, wait_secs: float) -> protocol.Signature:
        """Returns what the first server that answers says of its model."""
        deadline = time.monotonic() + wait_secs
        while True:
            for server in self._servers:
                try:
                    return server.signature(timeout_secs=self._timeout_secs)
                except protocol.BadAnswerError as error:
                    server.problem = str(error)
            if time.monotonic() >= deadline:
                problems = {s.address: s.problem for s in self._servers}
                raise RuntimeError(
                    f"A server must describe the model {self._model!r} within "
                    f"{wait_secs} s; received {problems}. Start one first, or "
                    "pass `outputs`."
                )
            time.sleep(_POLL_SECS)

    def _named(self, x: Any) -> dict[str, tf.Tensor]:
        """Returns inputs by the names and in the dtypes of the model."""
        ours = student_graph.named(x, "inputs")
        for name, tensor in ours.items():
            if not isinstance(tensor, tf.Tensor) or not tensor.shape.rank:
                raise ValueError(
                    "Inputs that servers are asked about must be dense tensors "
                    f"[batch, ...]; received {name}={tensor!r}. Batch the data "
                    "set first, and pass the teachers to its `map`."
                )
        if self._inputs is None:
            return ours
        pairs = other_graphs.match(
            {name: spec.shape for name, spec in self._inputs.items()},
            ours,
            what=f"inputs of the served model {self._model!r}",
        )
        return {
            theirs: tf.cast(ours[own], self._inputs[theirs].dtype)
            for own, theirs in pairs.items()
        }

    # ---- in the threads of the input pipeline ----

    def _labels(self, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Asks about a batch: version, time and seed, then the outputs."""
        first = next(iter(inputs.values()))
        rows = len(first)
        # A size that the signature leaves open, as of a sequence, is ours.
        expected = {
            name: (
                [rows, *_sizes(spec.shape[1:], first.shape[1:])],
                spec.dtype,
            )
            for name, spec in self._outputs.items()
        }
        found = self._asked(inputs, expected)
        if found and not self._is_checked:
            for output in found[1]:
                self._form.check(output)
            self._is_checked = True
        with self._lock:
            self._num_batches += 1
            self._num_rows += rows
            if found is None:
                self._num_absent_batches += 1
                self._num_absent_rows += rows
        version, outputs = found or (
            -1,
            [np.zeros(shape, np.float32) for shape, _ in expected.values()],
        )
        return [
            np.full([rows], version, np.int64),
            np.full([rows], time.time(), np.float64),
            np.array([self._seed, next(self._draws) % 2**30], np.int32),
            *outputs,
        ]

    def _asked(
        self, inputs: Mapping[str, np.ndarray], expected: Any
    ) -> tuple[int, list[np.ndarray]] | None:
        """Asks one server after the other; None if none has answered."""
        start = next(self._turn)
        order = [
            self._servers[(start + n) % len(self._servers)]
            for n in range(len(self._servers))
        ]
        left = [server for server in order if server.is_usable]
        if not left:
            return None
        question = protocol.question(self._model, inputs)
        deadline = time.monotonic() + self._timeout_secs
        while left:
            # What this one does not use is left for the others.
            share = (deadline - time.monotonic()) / len(left)
            server = left.pop(0)
            if share <= 0:
                break
            try:
                return server.ask(question, expected, timeout_secs=share)
            except protocol.BadAnswerError as error:
                self._refuse(server, error.kind, str(error))
            except ValueError as error:
                # gRPC's, once the channel is closed.
                self._refuse(server, servers_lib.REFUSED, str(error))
        return None

    def _refuse(
        self, server: servers_lib.Server, kind: str, reason: str
    ) -> None:
        with self._lock:
            count = self._refused[kind] = self._refused.get(kind, 0) + 1
        if count == 1:
            _log.warning(
                "Refused an answer of the teacher %s at %s (%s): %s It is "
                "left alone for a while; training goes on. Others like it are "
                "counted in Teachers.status().",
                self.name,
                server.address,
                kind,
                untrusted.one_line(reason),
            )


def _check(
    addresses: Sequence[str],
    timeout_secs: float,
    max_age_steps: int | None,
    max_age_secs: float | None,
) -> None:
    is_list = not isinstance(addresses, str) and len(addresses) > 0
    if (
        not is_list
        or len(set(addresses)) != len(addresses)
        or not all(isinstance(a, str) and ":" in a for a in addresses)
    ):
        raise ValueError(
            "`addresses` must be a list of one or more host:port, each once; "
            f"received {addresses!r}."
        )
    if not 0 < timeout_secs < math.inf:
        raise ValueError(
            f"`timeout_secs` must be > 0 and finite; received {timeout_secs!r}."
        )
    is_whole = max_age_steps is None or isinstance(max_age_steps, int)
    if not is_whole or (max_age_steps or 0) < 0:
        raise ValueError(
            "`max_age_steps` must be a whole number >= 0, or None; received "
            f"{max_age_steps!r}."
        )
    if max_age_secs is not None and not max_age_secs >= 0:
        raise ValueError(
            f"`max_age_secs` must be >= 0, or None; received {max_age_secs!r}."
        )


def _sizes(shape: Any, like: Sequence[int]) -> list[int]:
    """Fills open sizes from those at the same place, or with 1."""
    return [
        size if size is not None else (like[place] if place < len(like) else 1)
        for place, size in enumerate(shape)
    ]


def _close(servers: Sequence[servers_lib.Server]) -> None:
    for server in servers:
        server.close()
