"""The newest good version of a group, loaded and ready to answer.

Values go into one of two copies of the graph while the other one answers, so
that no request sees half of a version, and no version costs a load of its own.
"""

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfdistill.exchange import publisher
from tfdistill.exchange import versions
from tfdistill.exports import graph_check
from tfdistill.exports import other_graphs
from tfdistill.exports import saved_model
from tfdistill.exports import student_graph
from tfdistill.follow import follower
from tfdistill.follow import screen as screen_lib
from tfdistill.labels import protocol
from tfdistill.teachers import canary as canary_lib

_log = logging.getLogger(__name__)
# How long a request may hold the copy that the next version needs.
_IDLE_SECS = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Specs:
    """What all versions of the group must take and return."""

    input_spec: Mapping[str, tf.TensorSpec]
    output_spec: Mapping[str, tf.TensorSpec]
    schema: Mapping[str, str]

    @classmethod
    def of(cls, version: versions.Version) -> "_Specs":
        """Reads them from a manifest; ValueError if it has none."""
        found = version.manifest
        if not found.inputs or not found.outputs:
            raise ValueError("its manifest must name inputs and outputs.")
        schema = found.extras.get(screen_lib.SCHEMA_FIELD)
        return cls(
            input_spec=_structure(found.inputs),
            output_spec=_structure(found.outputs),
            schema=schema if isinstance(schema, Mapping) else {},
        )


class Served:
    """One copy of a graph: the version in it, and who is using it."""

    def __init__(
        self,
        function: other_graphs.FrozenFunction,
        specs: _Specs,
        fingerprint: str,
    ) -> None:
        """Holds no version yet."""
        self.version = -1
        self.fingerprint = fingerprint
        self.num_users = 0
        self.signature = protocol.Signature(
            inputs=specs.input_spec, outputs=specs.output_spec
        )
        self.function = function
        self._names = student_graph.leaf_names(specs.output_spec, "outputs")

    def predict(self, inputs: Mapping[str, Any]) -> dict[str, tf.Tensor]:
        """Predicts, by names of the signature."""
        outputs = self.function(inputs)
        return dict(zip(self._names, outputs, strict=True))

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
    the signed manifest, what its graph may hold, finite variables, the inputs
    and outputs of the first version, and a canary batch if there is one.
    """

    def __init__(
        self,
        exchange: publisher.Exchange,
        group: int,
        *,
        canary: canary_lib.Canary | None = None,
        trust_graph: bool = False,
        poll_secs: float = 0.2,
    ) -> None:
        """Reads nothing yet; `trust_graph` loads graphs that hold anything."""
        self.num_refused = 0
        # Of the versions that were read.
        self.num_bytes = 0
        self._exchange = exchange
        self._canary = canary
        self._trust_graph = trust_graph
        self._changed = threading.Condition()
        self._specs: _Specs | None = None
        self._current: Served | None = None
        self._idle: Served | None = None
        self._reader = follower.Follower(
            exchange, group, read=self._read, screen=self._screen, alone=True
        )
        self._poller = follower.Following(
            [self._reader], proposes=True, also=self._swap
        )

    def start(self) -> None:
        """Starts to look for versions."""
        self._poller.start()

    def stop(self) -> None:
        """Stops looking; what is in use stays in use."""
        self._poller.stop()

    @property
    def version(self) -> int:
        """The step of the version that answers now, or -1."""
        current = self._current
        return current.version if current else -1

    @contextlib.contextmanager
    def current(self) -> Iterator[Served | None]:
        """Gives the newest version, which stays as it is in the block."""
        with self._changed:
            served = self._current
            if served is not None:
                served.num_users += 1
        try:
            yield served
        finally:
            if served is not None:
                with self._changed:
                    served.num_users -= 1
                    self._changed.notify_all()

    # ---- the reading thread ----

    def _screen(self, version: versions.Version) -> None:
        try:
            graph_check.check_names(version.manifest.files)
            found = _Specs.of(version)
        except ValueError as error:
            raise screen_lib.Refused(str(error)) from error
        ours = self._specs
        if ours is None:
            return
        for what, spec, said in (
            ("inputs", ours.input_spec, version.manifest.inputs),
            ("outputs", ours.output_spec, version.manifest.outputs),
        ):
            screen_lib.check_spec(what, student_graph.to_json(spec, what), said)
        difference = screen_lib.schema_difference(ours.schema, found.schema)
        if difference:
            raise screen_lib.Refused(difference)

    def _read(self, version: versions.Version) -> Served:
        try:
            return self._loaded(version)
        except ValueError as error:
            raise screen_lib.Refused(str(error)) from error

    def _loaded(self, version: versions.Version) -> Served:
        """Returns a copy of the graph with the version's values in it."""
        specs = self._specs or _Specs.of(version)
        found = version.manifest
        variables = saved_model.in_order(found.variables)
        values = saved_model.read_variables(version.path, variables)
        served = self._idle
        if served is None or served.fingerprint != found.graph_fingerprint:
            function = other_graphs.load_version(
                self._exchange, version, specs, trust=self._trust_graph
            )
            served = Served(function, specs, found.graph_fingerprint)
            self._idle = served
        with self._changed:
            if not self._changed.wait_for(
                lambda: served.num_users == 0, timeout=_IDLE_SECS
            ):
                raise OSError("a request has not ended yet.")
        served.install(values)
        if self._canary is not None:
            self._canary.check(served.function, specs.output_spec)
        served.version = version.step
        self._specs = specs
        return served

    def _swap(self) -> None:
        if self._reader.state == follower.FAILED:
            self._reader.reject(self._reader.announced)
            self.num_refused += 1
        elif self._reader.state == follower.READY:
            taken = self._reader.take()
            self.num_bytes += taken.version.num_bytes
            served = taken.values
            with self._changed:
                self._current, self._idle = served, self._current
            _log.info("Serving version %d.", served.version)


def _structure(described: Mapping[str, Any]) -> dict[str, tf.TensorSpec]:
    try:
        return {
            name: tf.TensorSpec(leaf["shape"], tf.as_dtype(leaf["dtype"]), name)
            for name, leaf in described.items()
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"its manifest must give shape and dtype of each input and output; "
            f"received {described!r}."
        ) from error
