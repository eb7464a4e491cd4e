"""Whether the loops of a graph from elsewhere are sure to end.

A loop is let pass where its condition demands that a counter, which starts at
a constant >= 0 and grows by a constant >= 1, is less than a limit that stays
the same and is a constant of at most `MAX_STEPS` or the size of a tensor. That
is what `tf.while_loop(maximum_iterations=...)`, `tf.range` loops and Keras'
recurrent layers make. How long one round takes, or how large a tensor is, is
not judged.
"""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdistill import graph_functions
from tfdistill import graph_ops

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

    def __init__(self, library: graph_functions.Library) -> None:
        self._library = library
        # Of a tensor in a function: whether it holds sizes or small constants.
        self._known: dict[tuple[str, str, bool], bool] = {}

    def ends(self, function: graph_functions.Function, loop: Any) -> bool:
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
        function: graph_functions.Function,
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
        function: graph_functions.Function,
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


def check(library: graph_functions.Library) -> None:
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
            raise graph_functions.GraphError(
                f"its loops must not lie within other loops; {where} does."
            )
        if not loops.ends(function, node):
            raise graph_functions.GraphError(
                f"its loop {where} must count up to a constant of at most "
                f"{MAX_STEPS} or to the size of a tensor, so that it is sure "
                "to end. Give tf.while_loop `maximum_iterations`."
            )


def _conjuncts(
    condition: graph_functions.Function, tensor: str
) -> Iterator[Any]:
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


def _counts_up(body: graph_functions.Function, counter: int) -> bool:
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
