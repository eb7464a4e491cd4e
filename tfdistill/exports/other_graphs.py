"""Graphs that are not the student's own: checked, loaded, called as it is."""

import logging
import tempfile
import typing
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdistill.exchange import filesystem
from tfdistill.exchange import publisher
from tfdistill.exchange import versions
from tfdistill.exports import checkpoints
from tfdistill.exports import graph_check
from tfdistill.exports import student_graph

_log = logging.getLogger(__name__)


@typing.runtime_checkable
class _Written(typing.Protocol):
    """A loaded SavedModel that `saved_model.SavedModelWriter` wrote."""

    model_variables: Sequence[tf.Variable]


@typing.runtime_checkable
class _Quantized(typing.Protocol):
    """One in whose place of floats there are numbers with scales."""

    scales: Mapping[str, tf.Variable]


class FrozenFunction:
    """A loaded SavedModel that is called as the student is.

    Loading a SavedModel runs code from it: load none that you do not trust.
    """

    def __init__(
        self, directory: str, input_spec: object, output_spec: object = None
    ) -> None:
        """Loads a SavedModel; inside a strategy's scope, one copy a device.

        Its signature `serving_default` must fit the specs of the student's
        inputs and outputs, or ValueError. Without a student, outputs come as
        `in_flat_order` has them.
        """
        try:
            self._loaded = tf.saved_model.load(directory)
        except tf.errors.OpError as error:
            raise ValueError(
                f"The SavedModel {directory} must be whole; it is not: {error}"
            ) from error
        signature = self._loaded.signatures.get("serving_default")
        if signature is None:
            raise ValueError(
                f"The SavedModel {directory} must have the signature "
                f"'serving_default'; found {sorted(self._loaded.signatures)}."
            )
        self._signature = signature
        self.input_spec, self.output_spec = input_spec, output_spec
        # To assign new values to, if `SavedModelWriter` wrote them.
        self.variables: list[tf.Variable] = []
        if isinstance(self._loaded, _Written):
            self.variables += self._loaded.model_variables
        if isinstance(self._loaded, _Quantized):
            scales = self._loaded.scales
            self.variables += [scales[n] for n in sorted(scales, key=int)]
        wanted = signature.structured_input_signature[1]
        self._inputs = match(
            {name: spec.shape for name, spec in wanted.items()},
            student_graph.named(input_spec, "inputs"),
            what=f"inputs of {directory}",
        )
        names = sorted(signature.structured_outputs)
        ends = dict(
            zip(names, student_graph.ends(signature.outputs), strict=True)
        )
        self._dtypes = {name: spec.dtype for name, spec in wanted.items()}
        found = {
            name: spec.shape
            for name, spec in signature.structured_outputs.items()
        }
        self._outputs = (
            {name: name for name in in_flat_order(found)}
            if output_spec is None
            else match(
                found,
                student_graph.named(output_spec, "outputs"),
                what=f"outputs of {directory}",
            )
        )

        # The kind of each output; see `student_graph.ends`.
        self.ends = [ends[theirs] for theirs in self._outputs.values()]

    def install(self, values: Sequence[Any]) -> None:
        """Puts values in the variables, each in its variable's precision."""
        for variable, value in zip(self.variables, values, strict=True):
            variable.assign(tf.cast(value, variable.dtype))

    def fits(self, values: Sequence[Any]) -> bool:
        """Whether the variables have the shapes and kinds of these values."""
        return _kinds(self.variables) == _kinds(values)

    def check(self, values: Sequence[Any]) -> None:
        """Refuses values of other shapes or kinds than the variables have."""
        if not self.fits(values):
            raise ValueError(
                "its graph must have variables of the shapes "
                f"{_kinds(values)}, as its manifest says; found "
                f"{_kinds(self.variables)}."
            )

    def infer(self, inputs: object) -> list[tf.Tensor]:
        """Predicts; returns the outputs flat, in the order of the student's."""
        if not tf.distribute.in_cross_replica_context():
            return self._in_replica(inputs)
        # A graph loaded in a strategy's scope runs only on its replicas.
        strategy = tf.distribute.get_strategy()
        return [
            strategy.experimental_local_results(output)[0]
            for output in strategy.run(self._in_replica, args=(inputs,))
        ]

    __call__ = infer

    def _in_replica(self, inputs: object) -> list[tf.Tensor]:
        flat = student_graph.named(inputs, "inputs")
        fed = {
            theirs: tf.cast(flat[ours], self._dtypes[theirs])
            for ours, theirs in self._inputs.items()
        }
        outputs = self._signature(**fed)
        return [outputs[theirs] for theirs in self._outputs.values()]


def _kinds(values: Sequence[Any]) -> list[Any]:
    return [
        (*v.shape, "float" if v.dtype.is_floating else v.dtype) for v in values
    ]


def match(
    theirs: dict[str, tf.TensorShape], ours: dict[str, Any], *, what: str
) -> dict[str, str]:
    """Finds their name for each of ours: by name, or else by position.

    ValueError if `what` they are would not have the student's shapes.
    """
    by_legal_name = {
        student_graph.legal_name(name, "_"): name for name in theirs
    }
    if set(by_legal_name) == set(ours):
        pairs = {name: by_legal_name[name] for name in ours}
    elif len(theirs) == len(ours) and (
        len(ours) == 1 or all(n.startswith("output_") for n in theirs)
    ):
        pairs = dict(zip(ours, in_flat_order(theirs), strict=True))
    else:
        raise ValueError(
            f"The {what} must be named {sorted(ours)}; found {sorted(theirs)}."
        )
    for name, their_name in pairs.items():
        if not theirs[their_name].is_compatible_with(ours[name].shape):
            raise ValueError(
                f"The {what} must have the student's shapes: {name} is "
                f"{ours[name].shape}; found {theirs[their_name]}."
            )
    return pairs


def in_flat_order(names: Iterable[str]) -> list[str]:
    """Sorts outputs as `keras.tree.flatten` sorts a student's outputs.

    By name; names that differ only in a number at the end, by this number.
    """

    def place(name: str) -> tuple[str, int, str]:
        head, _, number = name.rpartition("_")
        is_number = bool(head) and number.isdigit()
        return (head, int(number), name) if is_number else (name, -1, name)

    return sorted(names, key=place)


def load(
    directory: str,
    input_spec: object,
    output_spec: object = None,
    *,
    trust: bool,
    remedy: str,
) -> FrozenFunction:
    """Loads a SavedModel that the user has named, by path or URL.

    With `trust`, what may not run is a warning, else a ValueError that names
    `remedy`, the option to set. ValueError too if it does not fit the specs.
    """
    if filesystem.in_object_store(directory):
        raise ValueError(
            "A SavedModel must be in a place that TensorFlow itself can read; "
            f"received {directory!r}. Copy it to a local directory first."
        )
    try:
        graph_check.check_directory(directory)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(
            "A SavedModel must be a directory that holds a saved_model.pb; "
            f"received {directory!r}. To convert a .keras file, call "
            "keras.models.load_model(FILE).export(DIR)."
        ) from error
    except (graph_check.GraphError, checkpoints.CheckpointError) as error:
        if not trust:
            raise ValueError(
                f"The SavedModel {directory} is not loaded: {error} If you "
                f"trust it as you would trust a program, set {remedy}."
            ) from error
        _log.warning("Loading the SavedModel %s, though %s", directory, error)
    return FrozenFunction(directory, input_spec, output_spec)


def load_version(
    exchange: publisher.Exchange,
    version: versions.Version,
    graph: Any,
    *,
    trust: bool = False,
) -> FrozenFunction:
    """Loads a peer's graph from a copy that no other process can change.

    `graph` has the student's specs, as a `StudentGraph` does. ValueError if it
    does not fit, or holds what may not run without `trust`.
    """
    with tempfile.TemporaryDirectory(prefix="tfdistill-peer-") as directory:
        exchange.fetch(version, directory)
        if not trust:
            graph_check.check_directory(directory)
        return FrozenFunction(directory, graph.input_spec, graph.output_spec)
