"""The functions in a SavedModel's library: who calls whom, and with what."""

import dataclasses
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfdistill import graph_ops

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
