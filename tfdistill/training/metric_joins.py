"""How the states of a metric on several replicas or workers make one state.

Keras takes all of them for sums. What a traced step assigns shows more: a state
that keeps a maximum or a minimum has the maximum or minimum of all. For other
assignments, such as the last value, it is unknown what several states make.
"""

import warnings
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterable

import keras
import tensorflow as tf

SUM, MEAN, MAX, MIN, OTHER = "sum", "mean", "max", "min", "other"
ADDED_UP = frozenset({SUM, OTHER})
EXTREMES = {MAX: tf.reduce_max, MIN: tf.reduce_min}

# By the type of an operation, what it makes of a state; if its state must be
# the first input, with True.
_JOINS = {
    "Add": (SUM, False),
    "AddN": (SUM, False),
    "AddV2": (SUM, False),
    "Maximum": (MAX, False),
    "Minimum": (MIN, False),
    "Sub": (SUM, True),
    "TensorScatterAdd": (SUM, True),
    "TensorScatterMax": (MAX, True),
    "TensorScatterMin": (MIN, True),
    "TensorScatterSub": (SUM, True),
}
_SAME = frozenset(
    {"Cast", "EnsureShape", "ExpandDims", "Identity", "Reshape", "Squeeze"}
)
_SHAPES = frozenset({"Rank", "Shape", "ShapeN", "Size"})
_ADDED = frozenset({"AssignAddVariableOp", "AssignSubVariableOp"})


def of_values(before: tf.Tensor, after: tf.Tensor) -> str | None:
    """Returns how a state joins that a graph makes of the one before.

    None if it is left as it is.
    """
    return _Graph([before]).join(after)


def of_variables(
    graph: tf.Graph, handles: Collection[tf.Tensor]
) -> list[str | None]:
    """Returns how variables join by all that a graph assigns to them.

    `handles` are the variables' handles outside of the graph.
    """
    is_function = isinstance(graph, tf.__internal__.FuncGraph)
    inner = {id(o): i for o, i in graph.captures} if is_function else {}
    places = {
        inner[id(handle)].ref(): index
        for index, handle in enumerate(handles)
        if id(handle) in inner
    }
    reads: dict[int, list[tf.Tensor]] = {i: [] for i in places.values()}
    assigned: list[tuple[int, tf.Operation]] = []
    for operation in graph.get_operations():
        first = operation.inputs[0].ref() if operation.inputs else None
        if first not in places:
            continue
        if operation.type == "ReadVariableOp":
            reads[places[first]].append(operation.outputs[0])
        elif operation.type in ("AssignVariableOp", *_ADDED):
            assigned.append((places[first], operation))
    found: list[str | None] = [None] * len(handles)
    for index, operation in assigned:
        seen = _Graph(reads[index])
        value = operation.inputs[1]
        if operation.type in _ADDED:
            join: str | None = OTHER if seen.depends(value) else SUM
        else:
            join = seen.join(value)
        if join is not None:
            found[index] = join if found[index] in (None, join) else OTHER
    return found


def operations_after(
    tensors: Iterable[tf.Tensor],
    until: Callable[[tf.Operation], bool] = lambda operation: False,
) -> set[tf.Operation]:
    """Returns what depends on some tensors in the graph that they are in.

    On their values: what depends on their shapes is left out. So is what
    depends on them only through operations for which `until` is true.
    """
    found: set[tf.Operation] = set()
    left = list(tensors)
    while left:
        for operation in left.pop().consumers():
            if operation in found or operation.type in _SHAPES:
                continue
            if not until(operation):
                found.add(operation)
                left += operation.outputs
    return found


class _Graph:
    def __init__(self, before: list[tf.Tensor]) -> None:
        self._before = {tensor.ref() for tensor in before}
        self._after = operations_after(before)

    def depends(self, tensor: tf.Tensor) -> bool:
        return tensor.ref() in self._before or tensor.op in self._after

    def join(self, tensor: tf.Tensor) -> str | None:
        if tensor.ref() in self._before:
            return None
        kind, inputs = tensor.op.type, list(tensor.op.inputs)
        if not self.depends(tensor):
            return OTHER
        if kind in _SAME and self.depends(inputs[0]):
            return self.join(inputs[0])
        if kind in ("Select", "SelectV2"):
            join = _both(*map(self.join, inputs[1:]))
            return OTHER if join and self.depends(inputs[0]) else join
        if kind not in _JOINS:
            return OTHER
        join, is_first = _JOINS[kind]
        of_state = [value for value in inputs if self.depends(value)]
        if join == SUM and len(of_state) > 1:
            return OTHER
        if is_first and of_state != inputs[:1]:
            return OTHER
        for value in of_state:
            join = _both(join, self.join(value)) or OTHER
        return join


def _both(one: str | None, other: str | None) -> str | None:
    if one is None or other is None:
        return one or other
    return one if one == other else OTHER


def warn_of_other(variable: keras.Variable, *, parts: str) -> None:
    """Warns that `parts` don't keep sums in a metric's variable."""
    warnings.warn(
        "A metric must keep sums, a maximum or a minimum, because each of "
        f"several {parts} updates it with its own rows; received an update of "
        f"another kind, of its variable {variable.path!r}. The values are "
        "added up, which is probably wrong. Keep sums and counts, and compute "
        "the metric in `result`; or, for a value that is the same everywhere, "
        'pass aggregation="mean" to `add_variable`.',
        stacklevel=2,
    )
