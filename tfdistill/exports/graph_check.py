"""Whether a SavedModel from elsewhere may be loaded: its files and its graph.

The file is read as a message and nothing in it is run. Loading a SavedModel
imports every function in it, runs those that make and fill its resources, and
calling it runs the signature's. So all functions are looked at, whatever
refers to them, and what can run is held to the shortest list; graph_ops.py has
the lists.

How long it runs is not judged: a loop may have no end. A task that makes no
more steps is for a watchdog to end.
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
from tfdistill.exports import checkpoints
from tfdistill.exports import graph_ops
from tfdistill.exports import student_graph

# A message of many empty parts takes far more than its bytes once parsed.
MAX_GRAPH_BYTES = 16 * 1024 * 1024
MAX_NODES = 30_000
MAX_FUNCTIONS = 3_000
MAX_OBJECTS = 30_000

# Handles and boxed values: they could stand for objects of this process.
_OPAQUE = (tf.resource.as_datatype_enum, tf.variant.as_datatype_enum)

GRAPH = "saved_model.pb"
_INDEX = "variables/variables.index"
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

# What draws random numbers; an inference that does was exported for training.
_DRAWS = re.compile(
    "Random|Rng|Multinomial|TruncatedNormal|Stateful(Standard|Uniform)"
)


class GraphError(ValueError):
    """A graph that must not be loaded; the message says what is in it."""


class TrainingModeError(GraphError):
    """A graph that predicts as if it trained, whoever made it."""


class Function:
    """A `FunctionDef` with its nodes by name; GraphError if it is malformed."""

    def __init__(self, definition: Any) -> None:
        self.definition = definition
        self.name = definition.signature.name
        self.nodes = {node.name: node for node in definition.node_def}
        self.arguments = [a.name for a in definition.signature.input_arg]
        self._positions = {n: i for i, n in enumerate(self.arguments)}
        if (
            len(self.nodes) != len(definition.node_def)
            or len(self._positions) != len(self.arguments)
            or self._positions.keys() & self.nodes.keys()
        ):
            raise GraphError(
                f"the names in its function {self.name!r} must differ."
            )

    def argument(self, tensor: str) -> int | None:
        """Finds the argument that a tensor is, through any `Identity`."""
        for _ in range(len(self.nodes) + 1):
            name = tensor.split(":")[0]
            if name in self._positions:
                return self._positions[name]
            node = self.nodes.get(name)
            if node is None or node.op != "Identity" or not node.input:
                break
            tensor = node.input[0]
        return None


class Library:
    """All functions of a graph, and which of them something calls.

    GraphError if a name stands for two things or for nothing.
    """

    def __init__(self, definitions: Iterable[Any]) -> None:
        self.functions: dict[str, Function] = {}
        for definition in definitions:
            function = Function(definition)
            name = function.name
            if name in self.functions or hasattr(tf.raw_ops, name):
                raise GraphError(
                    f"the name of its function {name!r} must be no other "
                    "function's or operation's."
                )
            self.functions[name] = function
        self._callees = {
            function.name: self._follow(function)
            for function in self.functions.values()
        }
        self.called = frozenset().union(*self._callees.values())

    def _follow(self, function: Function) -> set[str]:
        found = set(_named_functions(function.definition.attr))
        for node in function.nodes.values():
            found.update(_named_functions(node.attr))
            if node.op in self.functions:
                found.add(node.op)
        # Anything else would be looked up among this process's functions.
        if unknown := found - self.functions.keys():
            raise GraphError(
                f"its function {function.name!r} must call functions of its "
                f"own file only; found {sorted(unknown)[:3]}."
            )
        return found

    def reachable(self, names: Iterable[str]) -> set[str]:
        """Returns the functions with these names and all that they call."""
        found: set[str] = set()
        pending = list(names)
        while pending:
            name = pending.pop()
            if name not in self.functions:
                raise GraphError(
                    f"its objects must use functions of its own file only; "
                    f"found {name!r}."
                )
            if name not in found:
                found.add(name)
                pending += self._callees[name]
        return found


def _named_functions(attributes: Mapping[str, Any]) -> Iterator[str]:
    for attribute in attributes.values():
        for reference in (attribute.func, *attribute.list.func):
            if reference.name:
                yield reference.name
            if reference.attr:
                yield from _named_functions(reference.attr)


def check(content: bytes) -> None:
    """Checks the bytes of a saved_model.pb; raises GraphError."""
    graph = _parsed(content)
    objects = graph.object_graph_def
    _check_sizes(graph)
    library = Library(graph.graph_def.library.function)
    run = library.reachable(_run_functions(objects))
    _refuse_training(library.functions[name] for name in run)
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
    if len(parsed.meta_graphs) != 1 or not parsed.meta_graphs[0].HasField(
        "object_graph_def"
    ):
        raise GraphError(
            "it must hold one graph with objects, as TensorFlow 2 writes; it "
            f"holds {len(parsed.meta_graphs)} graphs. A TensorFlow 1 graph can "
            "run any of its operations when it is loaded."
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


def _refuse_training(functions: Iterable[Function]) -> None:
    for function in functions:
        for node in function.nodes.values():
            if _DRAWS.search(node.op):
                raise TrainingModeError(
                    "it must predict the same for the same inputs; it draws "
                    f"random numbers ({node.op}, {node.name!r}), as a model "
                    "does that was exported in training mode. Keras' "
                    "`model.export` does so with layers that augment: export "
                    "it again by tfdistill.CodistillModel(model).export(DIR)."
                )


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
    library: Library,
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


def _check_assets(graph: Any, library: Library) -> None:
    """Lets tables be filled only from the SavedModel's own assets."""
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
                function.name in library.called
            ):
                raise GraphError(
                    "its tables must be filled from its own assets; "
                    f"{node.name!r} in its function {function.name!r} names "
                    "its file itself."
                )


def _is_asset(function: Function, node: Any, bound: Any, objects: Any) -> bool:
    if len(node.input) < 2 or bound is None:
        return False
    position = function.argument(node.input[1])
    if position is None:
        return False
    # Captured tensors follow the arguments that a caller passes.
    captured = position - (len(function.arguments) - len(bound.bound_inputs))
    if captured < 0:
        return False
    number = bound.bound_inputs[captured]
    return (
        0 <= number < len(objects.nodes)
        and objects.nodes[number].WhichOneof("kind") == "asset"
    )


def check_names(names: Iterable[str]) -> None:
    """Checks the files that a version lists, by their paths inside it."""
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

    No more than it can need, given whether it is of the student's own graph.
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
    """Checks a SavedModel before it is loaded: files, graph and variables.

    GraphError, or CheckpointError for the variables.
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
    if _INDEX in files:
        checkpoints.contents(root)


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
