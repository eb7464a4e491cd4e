"""Whether a SavedModel from elsewhere may be loaded: its files and its graph.

The file is read as a message and nothing in it is run. Loading a SavedModel
imports every function in it, runs those that make and fill its resources, and
calling it runs the signature's. So every function is held to a list of
operations, and what can run to the shortest one; graph_ops.py has the lists.

How long it runs is not judged: a loop may have no end. A task that makes no
more steps is for a watchdog to end.
"""

import operator
import os
import re
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from tfdistill.exchange import filesystem
from tfdistill.exchange import manifest
from tfdistill.exports import checkpoints
from tfdistill.exports import graph_ops
from tfdistill.exports import student_graph

MAX_GRAPH_BYTES = 16 * 1024 * 1024
# Handles and boxed values: they could stand for objects of this process.
_OPAQUE = (tf.resource.as_datatype_enum, tf.variant.as_datatype_enum)

GRAPH = "saved_model.pb"
_INDEX = "variables/variables.index"
# The largest version: this, or sixteen times the student's variables if more.
MAX_BYTES = 4 * 1024**3

# No saved_model.pbtxt or saved_model.cpb, which TensorFlow loads too; nothing
# that is unpickled or that Keras loads. Assets are texts for lookup tables.
_NAME = re.compile(
    r"saved_model\.pb|fingerprint\.pb"
    r"|variables/variables\.(index|data-[0-9]{5}-of-[0-9]{5})"
    r"|assets/[A-Za-z0-9_-][A-Za-z0-9_-]*(\.[0-9]+)*(\.(txt|tsv|csv|vocab))?"
)
# Files that promoting and other exporters add; `tf.saved_model.load` never
# reads them.
_UNREAD = re.compile(
    r"manifest\.json|README\.md|keras_metadata\.pb"
    r"|debug/saved_model_debug_info\.pb|assets\.extra/[A-Za-z0-9_./-]+"
)

# Added to messages about operations in functions that only training calls.
_IN_TRAINING = (
    " Keras' `model.export` exports layers that augment in training mode: "
    "export the model again by tfdistill.CodistillModel(model).export(DIR)."
)


class GraphError(ValueError):
    """A graph that must not be loaded; the message says what is in it."""


def check(content: bytes) -> None:
    """Checks the bytes of a saved_model.pb; raises GraphError."""
    graph = _parsed(content)
    objects = graph.object_graph_def
    definitions = graph.graph_def.library.function
    own = {function.signature.name for function in definitions}
    if shadows := sorted(own & set(dir(tf.raw_ops))):
        raise GraphError(
            "its functions must not have the names of operations; found "
            f"{shadows[:3]}."
        )
    callees: dict[str, set[str]] = {}
    for function in definitions:
        called = callees.setdefault(function.signature.name, set())
        called.update(_called(function.attr))
        for node in function.node_def:
            called.update(_called(node.attr), {node.op} & own)
    run = _reachable(_run_functions(objects), callees)
    for function in definitions:
        name = function.signature.name
        allowed = graph_ops.RUN if name in run else graph_ops.UNCALLED
        for node in function.node_def:
            _check_node(node, allowed | own, where=f"its function {name!r}")
            if node.op == graph_ops.FILE_TABLE and (
                not _is_asset(function, node, objects)
                or any(name in called for called in callees.values())
            ):
                raise GraphError(
                    "its tables must be filled from its own assets; "
                    f"{node.name!r} in its function {name!r} names its file "
                    "itself."
                )
    # Even functions that never run must not use functions of this process.
    _reachable(callees, callees)
    for node in graph.graph_def.node:
        _check_node(node, graph_ops.TOP | own, where="its graph")
    for asset in graph.asset_file_def:
        try:
            manifest.check_file_name(asset.filename)
        except manifest.ManifestError as error:
            raise GraphError(
                f"an asset has an invalid name: {error}"
            ) from error


def _parsed(content: bytes) -> Any:
    if len(content) > MAX_GRAPH_BYTES:
        raise GraphError(
            f"its saved_model.pb must have at most {MAX_GRAPH_BYTES} bytes; "
            "it has more."
        )
    try:
        parsed = saved_model_pb2.SavedModel.FromString(content)
    except Exception as error:  # protobuf's own kind; it comes by TensorFlow.
        raise GraphError(
            "its saved_model.pb must hold a SavedModel; it does not."
        ) from error
    if len(parsed.meta_graphs) != 1 or (
        not parsed.meta_graphs[0].object_graph_def.nodes
    ):
        raise GraphError(
            "it must hold one graph with objects, as TensorFlow 2 writes it; "
            f"it holds {len(parsed.meta_graphs)} graphs. A TensorFlow 1 graph "
            "can run any of its operations when it is loaded."
        )
    return parsed.meta_graphs[0]


def _called(attributes: Mapping[str, Any]) -> Iterator[str]:
    """Yields the names of functions in attributes, however deep."""
    for attribute in attributes.values():
        for reference in (attribute.func, *attribute.list.func):
            if reference.name:
                yield reference.name
            if reference.attr:
                yield from _called(reference.attr)


def _reachable(
    names: Iterable[str], callees: Mapping[str, Iterable[str]]
) -> set[str]:
    """Returns the functions with these names and all that they call."""
    found: set[str] = set()
    pending = list(names)
    while pending:
        name = pending.pop()
        # Anything else would be looked up among this process's functions.
        if name not in callees:
            raise GraphError(
                f"it must only call functions in its own file; found {name!r}."
            )
        if name not in found:
            found.add(name)
            pending += callees[name]
    return found


def _run_functions(objects: Any) -> Iterator[str]:
    """Yields what loading, calling and dropping the SavedModel may run."""
    nodes = dict(enumerate(objects.nodes))
    try:
        owners = [
            n for n in nodes.values() if n.WhichOneof("kind") == "resource"
        ]
        for reference in nodes[0].children:
            if reference.local_name == "signatures":
                owners.append(nodes[reference.node_id])
        run = [child.node_id for owner in owners for child in owner.children]
        for node in nodes.values():
            for saveable in node.saveable_objects.values():
                run += [saveable.save_function, saveable.restore_function]
        for number in run:
            yield from nodes[number].function.concrete_functions
            bare = nodes[number].bare_concrete_function
            if bare.concrete_function_name:
                yield bare.concrete_function_name
    except KeyError as error:
        raise GraphError(f"its object {error} is missing.") from error


def _check_node(
    node: tf.compat.v1.NodeDef, allowed: frozenset[str], *, where: str
) -> None:
    if node.op not in allowed:
        raise GraphError(
            f"{where} must hold only operations that cannot reach beyond the "
            f"model; found {node.op} ({node.name!r})."
            + (_IN_TRAINING if node.op in graph_ops.UNCALLED else "")
        )
    if any(dtype in _OPAQUE for dtype in _tensor_dtypes(node.attr)):
        raise GraphError(
            f"{where} must hold no handle as a constant; {node.name!r} is one."
        )


def _tensor_dtypes(attributes: Mapping[str, Any]) -> Iterator[int]:
    for attribute in attributes.values():
        if attribute.HasField("tensor"):
            yield attribute.tensor.dtype
        yield from (tensor.dtype for tensor in attribute.list.tensor)
        if attribute.func.attr:
            yield from _tensor_dtypes(attribute.func.attr)


def _is_asset(function: Any, node: tf.compat.v1.NodeDef, objects: Any) -> bool:
    """Whether a table's file is an asset that the function is bound to."""
    arguments = [argument.name for argument in function.signature.input_arg]
    if len(node.input) < 2 or node.input[1] not in arguments:
        return False
    bound = objects.concrete_functions[function.signature.name].bound_inputs
    # Captured tensors follow the arguments that a caller passes.
    captured = arguments.index(node.input[1]) - len(arguments) + len(bound)
    return (
        captured >= 0
        and 0 <= bound[captured] < len(objects.nodes)
        and objects.nodes[bound[captured]].WhichOneof("kind") == "asset"
    )


def check_names(names: Iterable[str]) -> None:
    """Checks the files that a version lists, by their paths inside it."""
    found = set(names)
    for name in sorted(found):
        if not _NAME.fullmatch(name):
            raise GraphError(
                "its files must be the files of a SavedModel (saved_model.pb, "
                "fingerprint.pb, variables, and texts in assets); found "
                f"{name!r}."
            )
    if GRAPH not in found:
        raise GraphError(f"its files must include {GRAPH}.")


def check_size(num_bytes: int, graph: student_graph.StudentGraph) -> None:
    """Checks that a version has no more bytes, by its manifest, than it can."""
    variables = graph.variables
    elements = [tf.TensorShape(v.shape).num_elements() or 0 for v in variables]
    sizes = [tf.as_dtype(v.dtype).size for v in variables]
    ours = sum(map(operator.mul, elements, sizes))
    most = max(MAX_BYTES, 16 * ours)
    if num_bytes > most:
        raise GraphError(
            f"it must have at most {most} bytes, for a student of {ours}; its "
            f"manifest names {num_bytes}."
        )


def check_directory(directory: str) -> None:
    """Checks a SavedModel before it is loaded: files, graph and variables.

    GraphError, or CheckpointError for the variables.
    """
    if "://" not in directory:
        # Only what is below it must not be linked.
        directory = os.path.realpath(directory)
    file_system, root = filesystem.for_root(directory)
    files = set()
    for name, found in filesystem.walk(file_system, root):
        if not (found.is_dir or found.is_file):
            raise GraphError(
                f"its files must be regular files; {name!r} is a link or a "
                "device."
            )
        if found.is_file:
            files.add(name)
    check_names(name for name in files if not _UNREAD.fullmatch(name))
    path = f"{root}/{GRAPH}"
    check(filesystem.read(file_system, path, max_bytes=MAX_GRAPH_BYTES))
    if _INDEX in files:
        checkpoints.contents(root)
