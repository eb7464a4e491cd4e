"""Whether a SavedModel from elsewhere may be loaded: its files and its graph.

The file is read as a message and nothing in it is run. Loading a SavedModel
imports every function in it, runs those that make and fill its resources, and
calling it runs the signature's. So all functions are looked at, whatever
refers to them, and what can run is held to the shortest list; graph_ops.py has
the lists.
"""

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
from tfdistill.exports import graph_functions
from tfdistill.exports import graph_ops
from tfdistill.exports import student_graph

GraphError = graph_functions.GraphError

# A message of many empty parts takes far more than its bytes once parsed.
MAX_GRAPH_BYTES = 16 * 1024 * 1024
MAX_NODES = 30_000
MAX_FUNCTIONS = 3_000
MAX_OBJECTS = 30_000

# Handles and boxed values: they could stand for objects of this process.
_OPAQUE = (tf.resource.as_datatype_enum, tf.variant.as_datatype_enum)


def check(content: bytes) -> None:
    """Checks a saved_model.pb.

    Args:
        content: The file's bytes.

    Raises:
        GraphError: It must not be loaded.
    """
    graph = _parsed(content)
    objects = graph.object_graph_def
    _check_sizes(graph)
    library = graph_functions.Library(graph.graph_def.library.function)
    run = library.reachable(_run_functions(objects))
    named = library.reachable([*objects.concrete_functions, *run])
    for name, function in library.functions.items():
        allowed = graph_ops.SAVING
        if name in run:
            allowed = graph_ops.RUN
        elif name in named:
            allowed = graph_ops.UNCALLED
        where = f"its function {name!r}"
        for node in function.nodes.values():
            _check_node(node, allowed, library, where)
    for node in graph.graph_def.node:
        _check_node(node, graph_ops.TOP, library, "its graph")
    _check_assets(graph, library)
    graph_functions.check_loops(library)


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
            "its saved_model.pb must be one; it is not."
        ) from error
    if len(parsed.meta_graphs) != 1 or not parsed.meta_graphs[0].HasField(
        "object_graph_def"
    ):
        raise GraphError(
            "it must hold one graph with objects, as TensorFlow 2 writes; it "
            f"holds {len(parsed.meta_graphs)} graphs. One of TensorFlow 1 runs "
            "operations of its choice when it is loaded."
        )
    return parsed.meta_graphs[0]


def _check_sizes(graph: Any) -> None:
    functions = graph.graph_def.library.function
    num_nodes = len(graph.graph_def.node)
    num_nodes += sum(len(f.node_def) for f in functions)
    for what, found, most in (
        ("operations", num_nodes, MAX_NODES),
        ("functions", len(functions), MAX_FUNCTIONS),
        ("objects", len(graph.object_graph_def.nodes), MAX_OBJECTS),
    ):
        if found > most:
            raise GraphError(
                f"it must hold at most {most} {what}; it holds {found}."
            )


def _run_functions(objects: Any) -> Iterator[str]:
    """Yields what loading, calling and dropping the SavedModel may run."""
    nodes = objects.nodes
    if not nodes:
        raise GraphError("it must hold objects; it holds none.")

    def child(node: Any, number: int) -> Any:
        if not 0 <= number < len(nodes):
            raise GraphError(f"its object {number} is missing.")
        return nodes[number]

    owners = [node for node in nodes if node.WhichOneof("kind") == "resource"]
    for reference in nodes[0].children:
        if reference.local_name == "signatures":
            owners.append(child(nodes[0], reference.node_id))
    for owner in owners:
        for reference in owner.children:
            yield from _functions_of(child(owner, reference.node_id))
    for node in nodes:
        for saveable in node.saveable_objects.values():
            for number in (saveable.save_function, saveable.restore_function):
                yield from _functions_of(child(node, number))


def _functions_of(node: Any) -> list[str]:
    kind = node.WhichOneof("kind")
    if kind == "function":
        return list(node.function.concrete_functions)
    if kind == "bare_concrete_function":
        return [node.bare_concrete_function.concrete_function_name]
    return []


def _check_node(
    node: Any,
    allowed: frozenset[str],
    library: graph_functions.Library,
    where: str,
) -> None:
    if node.op not in allowed and node.op not in library.functions:
        raise GraphError(
            f"{where} must hold only operations that cannot reach beyond the "
            f"model; found {node.op} ({node.name!r})."
        )
    if any(dtype in _OPAQUE for dtype in _tensor_dtypes(node.attr)):
        raise GraphError(
            f"{where} must hold no handle as a constant; {node.name!r} is one."
        )


def _tensor_dtypes(attributes: Mapping[str, Any]) -> Iterator[int]:
    for attribute in attributes.values():
        kind = attribute.WhichOneof("value")
        if kind == "tensor":
            yield attribute.tensor.dtype
        elif kind == "list":
            yield from (tensor.dtype for tensor in attribute.list.tensor)
        elif kind == "func":
            yield from _tensor_dtypes(attribute.func.attr)


def _check_assets(graph: Any, library: graph_functions.Library) -> None:
    """Lets tables be filled from the SavedModel's own assets alone."""
    objects = graph.object_graph_def
    for asset in graph.asset_file_def:
        try:
            manifest.check_file_name(asset.filename)
        except manifest.ManifestError as error:
            raise GraphError(
                f"the name of an asset is wrong: {error}"
            ) from error
    for function in library.functions.values():
        for node in function.nodes.values():
            if node.op != graph_ops.FILE_TABLE:
                continue
            bound = objects.concrete_functions.get(function.name)
            if not _is_asset(function, node, bound, objects) or (
                function.name in library.calls
            ):
                raise GraphError(
                    "its tables must be filled from its own assets; "
                    f"{node.name!r} in its function {function.name!r} names "
                    "its file itself."
                )


def _is_asset(
    function: graph_functions.Function, node: Any, bound: Any, objects: Any
) -> bool:
    if len(node.input) < 2 or bound is None:
        return False
    made_by, position = function.source(node.input[1])
    # Captured tensors follow the arguments that a caller passes.
    captured = position - (len(function.arguments) - len(bound.bound_inputs))
    if made_by is not None or captured < 0:
        return False
    number = bound.bound_inputs[captured]
    return (
        0 <= number < len(objects.nodes)
        and objects.nodes[number].WhichOneof("kind") == "asset"
    )


GRAPH = "saved_model.pb"
# What a peer may publish whose graph is not the student's.
MAX_OTHER_BYTES = 4 * 1024**3
# A graph's file, and vocabularies.
_SPARE_BYTES = MAX_GRAPH_BYTES + 64 * 1024**2

# No saved_model.pbtxt or saved_model.cpb, which TensorFlow loads too; nothing
# that is unpickled or that Keras loads. Assets are texts for lookup tables.
_NAME = re.compile(
    r"saved_model\.pb|fingerprint\.pb"
    r"|variables/variables\.(index|data-[0-9]{5}-of-[0-9]{5})"
    r"|assets/[A-Za-z0-9_-][A-Za-z0-9_-]*(\.[0-9]+)*(\.(txt|tsv|csv|vocab))?"
)
# What other exporters leave beside them, and `tf.saved_model.load` never reads.
_UNREAD = re.compile(
    r"manifest\.json|keras_metadata\.pb|debug/saved_model_debug_info\.pb"
    r"|assets\.extra/[A-Za-z0-9_.-]+"
)


def check_names(names: Iterable[str]) -> None:
    """Checks the files that a version lists.

    Args:
        names: Paths below the version's directory.

    Raises:
        GraphError: One is not a SavedModel's, or the graph is missing.
    """
    found = set(names)
    for name in sorted(found):
        if not _NAME.fullmatch(name):
            raise GraphError(
                "its files must be those of a SavedModel (saved_model.pb, "
                "fingerprint.pb, variables, and texts in assets); found "
                f"{name!r}."
            )
    if GRAPH not in found:
        raise GraphError(f"its files must include {GRAPH}.")


def check_size(
    num_bytes: int, graph: student_graph.StudentGraph, *, own_graph: bool
) -> None:
    """Checks the bytes that a version has by its manifest.

    Args:
        num_bytes: Of all its files.
        graph: The student's.
        own_graph: Whether the version is of the student's own graph.

    Raises:
        GraphError: They are more than such a version can need.
    """
    ours = sum(_num_bytes(variable) for variable in graph.variables)
    most = 2 * ours + _SPARE_BYTES
    if not own_graph:
        most = max(8 * most, MAX_OTHER_BYTES)
    if num_bytes > most:
        raise GraphError(
            f"it must have at most {most} bytes, for a student of {ours}; its "
            f"manifest names {num_bytes}."
        )


def _num_bytes(variable: Any) -> int:
    elements = tf.TensorShape(variable.shape).num_elements() or 0
    return int(elements) * tf.as_dtype(variable.dtype).size


def check_directory(directory: str) -> None:
    """Checks a SavedModel before it is loaded: its files, then its graph.

    Args:
        directory: A path or URL.

    Raises:
        GraphError: It must not be loaded.
        OSError: It cannot be read.
    """
    if "://" not in directory:
        # Only what is below it must not be linked.
        directory = os.path.realpath(directory)
    file_system, root = filesystem.for_root(directory)
    files = _listed(file_system, root)
    check_names(name for name in files if not _UNREAD.fullmatch(name))
    check(
        filesystem.read(
            file_system,
            f"{root}/{GRAPH}",
            max_bytes=MAX_GRAPH_BYTES,
        )
    )


def _listed(
    file_system: filesystem.FileSystem, root: str
) -> Mapping[str, filesystem.Stat]:
    files = {}
    for name, found in filesystem.walk(file_system, root):
        if found.is_dir:
            continue
        if not found.is_file:
            raise GraphError(
                f"its files must be regular ones; {name!r} is a link or a "
                "device."
            )
        files[name] = found
    return files
