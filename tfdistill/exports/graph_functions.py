"""The functions of a graph from elsewhere: who calls whom; do loops end.

A loop is let pass where its condition demands that a counter, which starts at
a constant >= 0 and grows by a constant >= 1, is less than a limit that stays
the same and is a constant of at most `MAX_STEPS` or the size of a tensor. That
is what `tf.while_loop(maximum_iterations=...)`, `tf.range` loops and Keras'
recurrent layers make. How long one round takes, or how large a tensor is, is
not judged.
"""

import dataclasses
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfdistill.exports import graph_ops

# How many of a node's inputs come before those handed to the callee.
_SKIPPED = dict.fromkeys(graph_ops.BRANCHES, 1)


class GraphError(ValueError):
    """A graph that must not be loaded; the message says what is in it."""


@dataclasses.dataclass(frozen=True)
class Call:
    """One place where a function hands its tensors to another one."""

    caller: str
    node: Any
    arguments: tuple[str, ...]


class Function:
    """A `FunctionDef` with its nodes by name.

    Attributes:
        name: Its name in the library.
        nodes: Node by name.
        arguments: Names of its arguments, in order.
        returns: The tensor that each output is, in order.
    """

    def __init__(self, definition: Any) -> None:
        """Looks the definition over.

        Args:
            definition: A `FunctionDef`.

        Raises:
            GraphError: Two of its nodes have one name, or it is malformed.
        """
        self.definition = definition
        self.name = definition.signature.name
        self.nodes = {node.name: node for node in definition.node_def}
        self.arguments = [a.name for a in definition.signature.input_arg]
        self._positions = {n: i for i, n in enumerate(self.arguments)}
        outputs = [a.name for a in definition.signature.output_arg]
        self.returns = [definition.ret.get(name, "") for name in outputs]
        if (
            len(self.nodes) != len(definition.node_def)
            or len(self._positions) != len(self.arguments)
            or self._positions.keys() & self.nodes.keys()
        ):
            raise GraphError(
                f"the names in its function {self.name!r} must differ."
            )

    def source(self, tensor: str) -> tuple[Any, int]:
        """Finds what makes a tensor, through any number of `Identity`.

        Args:
            tensor: `argument` or `node:output:number`.

        Returns:
            `(None, position)` for an argument, `(node, number)` for the
            numbered part of a node's output.

        Raises:
            GraphError: There is no such tensor.
        """
        for _ in range(len(self.nodes) + 1):
            name, *parts = tensor.split(":")
            if name in self._positions:
                return None, self._positions[name]
            node = self.nodes.get(name)
            if node is None:
                break
            if node.op != "Identity" or not node.input:
                last = parts[-1] if parts else "0"
                return node, int(last) if last.isdigit() else 0
            tensor = node.input[0]
        raise GraphError(
            f"its function {self.name!r} must say where {tensor!r} comes from."
        )


class Library:
    """All functions of a graph.

    Attributes:
        functions: Function by name.
        calls: The calls of each function, by the callee's name.
    """

    def __init__(self, definitions: Iterable[Any]) -> None:
        """Looks the functions over.

        Args:
            definitions: `FunctionDef`s.

        Raises:
            GraphError: A name stands for two things or for nothing, or a
                function calls itself.
        """
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
        self.calls: dict[str, list[Call]] = {}
        self._callees: dict[str, set[str]] = {}
        for function in self.functions.values():
            self._callees[function.name] = self._follow(function)
        self._refuse_recursion()

    def _follow(self, function: Function) -> set[str]:
        found = set(_named_functions(function.definition.attr))
        for node in function.nodes.values():
            named = set(_named_functions(node.attr))
            if node.op in self.functions:
                named.add(node.op)
            skipped = _SKIPPED.get(node.op, 0)
            data = tuple(i for i in node.input if not i.startswith("^"))
            for callee in named:
                call = Call(function.name, node, data[skipped:])
                self.calls.setdefault(callee, []).append(call)
            found |= named
        # Anything else would be looked up among this process's functions.
        if unknown := found - self.functions.keys():
            raise GraphError(
                f"its function {function.name!r} must call functions of its "
                f"own file alone; found {sorted(unknown)[:3]}."
            )
        return found

    def _refuse_recursion(self) -> None:
        """Removes functions that call no remaining one until none is left."""
        left = {name: set(found) for name, found in self._callees.items()}
        ready = [name for name, found in left.items() if not found]
        while ready:
            callee = ready.pop()
            del left[callee]
            for call in self.calls.get(callee, ()):
                if call.caller in left and callee in left[call.caller]:
                    left[call.caller].discard(callee)
                    if not left[call.caller]:
                        ready.append(call.caller)
        # What `FunctionDef.attr` names is no call, and must not be a circle.
        if left:
            raise GraphError(
                f"its functions must not call themselves; {sorted(left)[:3]} "
                "do."
            )

    def reachable(self, names: Iterable[str]) -> set[str]:
        """Returns the functions with these names and all that they call.

        Raises:
            GraphError: There is no function of such a name.
        """
        found: set[str] = set()
        pending = list(names)
        while pending:
            name = pending.pop()
            if name not in self.functions:
                raise GraphError(
                    f"its objects must use functions of its own file alone; "
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


MAX_STEPS = 100_000
# The largest or smallest of sizes, or one of them, is such a size too.
_KEEPS_SIZES = {
    "Cast": 1,
    "ConcatV2": None,
    "ExpandDims": 1,
    "GatherV2": 1,
    "Max": 1,
    "Maximum": None,
    "Min": 1,
    "Minimum": None,
    "Pack": None,
    "Reshape": 1,
    "Squeeze": 1,
    "StridedSlice": 1,
}
_SIZES = ("Rank", "Shape", "Size")
_PARTS = ("body", "cond")
_MAX_DEPTH = 100


class _Loops:
    """The loops of one library, and what is known of its tensors so far."""

    def __init__(self, library: Library) -> None:
        self._library = library
        # Of a tensor in a function: whether it holds sizes or small constants.
        self._known: dict[tuple[str, str, bool], bool] = {}

    def ends(self, function: Function, loop: Any) -> bool:
        """Whether the loop, a node of the function, is sure to end."""
        functions = self._library.functions
        condition = functions[loop.attr["cond"].func.name]
        body = functions[loop.attr["body"].func.name]
        inputs = [i for i in loop.input if not i.startswith("^")]
        if len(condition.returns) != 1 or not (
            len(inputs) == len(condition.arguments) == len(body.returns)
        ):
            return False
        for less in _conjuncts(condition, condition.returns[0]):
            made_by, counter = condition.source(less.input[0])
            if made_by is not None or not _counts_up(body, counter):
                continue
            limit_in, limit = condition, less.input[1]
            made_by, position = condition.source(limit)
            if made_by is None:
                if body.source(body.returns[position]) != (None, position):
                    continue
                limit_in, limit = function, inputs[position]
            starts = self._is_small(function, inputs[counter], sizes=False)
            if starts and self._is_small(limit_in, limit):
                return True
        return False

    def _is_small(
        self,
        function: Function,
        tensor: str,
        *,
        sizes: bool = True,
        depth: int = 0,
    ) -> bool:
        """Whether a tensor holds small constants >= 0, or sizes, alone.

        Arguments are followed to whatever any caller passes.
        """
        key = (function.name, tensor, sizes)
        if key not in self._known:
            # A circle, and what is too far away to tell, are not small.
            self._known[key] = False
            if depth < _MAX_DEPTH:
                self._known[key] = self._looks_small(
                    function, tensor, sizes, depth + 1
                )
        return self._known[key]

    def _looks_small(
        self,
        function: Function,
        tensor: str,
        sizes: bool,
        depth: int,
    ) -> bool:
        node, position = function.source(tensor)
        if node is None:
            calls = self._library.calls.get(function.name, ())
            return bool(calls) and all(
                call.node.op not in graph_ops.LOOPS
                and position < len(call.arguments)
                and self._is_small(
                    self._library.functions[call.caller],
                    call.arguments[position],
                    sizes=sizes,
                    depth=depth,
                )
                for call in calls
            )
        if node.op == "Const":
            return _is_constant(node, 0)
        if not sizes or node.op not in _KEEPS_SIZES:
            return sizes and node.op in _SIZES
        data = [i for i in node.input if not i.startswith("^")]
        return bool(data) and all(
            self._is_small(function, part, depth=depth)
            for part in data[: _KEEPS_SIZES[node.op]]
        )


def check_loops(library: Library) -> None:
    """Checks every loop.

    Raises:
        GraphError: A loop may not end, or lies within another one.
    """
    found = [
        (function, node)
        for function in library.functions.values()
        for node in function.nodes.values()
        if node.op in graph_ops.LOOPS
    ]
    inside = library.reachable(
        node.attr[part].func.name for _, node in found for part in _PARTS
    )
    loops = _Loops(library)
    for function, node in found:
        where = f"{node.name!r} in its function {function.name!r}"
        if function.name in inside:
            raise GraphError(
                f"its loops must not lie within other loops; {where} does."
            )
        if not loops.ends(function, node):
            raise GraphError(
                f"its loop {where} must count up to a constant of at most "
                f"{MAX_STEPS} or to the size of a tensor, so that it is sure "
                "to end. Give tf.while_loop `maximum_iterations`."
            )


def _conjuncts(condition: Function, tensor: str) -> Iterator[Any]:
    """Yields each `Less` that must hold for the condition to hold."""
    pending = [tensor]
    for _ in range(_MAX_DEPTH):
        if not pending:
            return
        node, _ = condition.source(pending.pop())
        if node is not None and len(node.input) >= 2:
            if node.op == "LogicalAnd":
                pending += node.input[:2]
            elif node.op == "Less":
                yield node


def _counts_up(body: Function, counter: int) -> bool:
    node, _ = body.source(body.returns[counter])
    if node is None or node.op not in ("Add", "AddV2"):
        return False
    ends = [body.source(tensor) for tensor in node.input[:2]]
    others = [end for end in ends if end != (None, counter)]
    return len(others) == 1 and _is_constant(others[0][0], 1)


def _is_constant(node: Any, least: int) -> bool:
    """Whether a node holds whole numbers in `least` to `MAX_STEPS` alone."""
    if node is None or node.op != "Const":
        return False
    tensor = node.attr["value"].tensor
    if tensor.dtype not in (
        tf.int32.as_datatype_enum,
        tf.int64.as_datatype_enum,
    ):
        return False
    sizes = [dim.size for dim in tensor.tensor_shape.dim]
    if len(sizes) > 1 or any(not 0 <= size <= 64 for size in sizes):
        return False
    try:
        values = tf.make_ndarray(tensor)
    except ValueError:  # Its content does not have its shape.
        return False
    return bool(((values >= least) & (values <= MAX_STEPS)).all())
