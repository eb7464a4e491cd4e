"""Whether a model's own training step or call needs all rows of a batch.

A replica has some of them. For a loss that compares rows, such as a contrastive
one, these are others than one device would have, and a variable that is
assigned what comes from rows, such as a queue of them, would differ by replica.
Both are seen in the graph of a trace.
"""

import functools
import re
from collections.abc import Callable
from collections.abc import Container
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistill.system import keras_internals
from tfdistill.training import global_batch
from tfdistill.training import metric_joins

# Operations on two rows that are beside each other, in operands of one shape.
_BESIDE = frozenset(
    {
        *("Add", "AddV2", "Equal", "Mul", "NotEqual", "RealDiv"),
        *("SquaredDifference", "Sub"),
    }
)
_CALLS = "PartitionedCall", "StatefulPartitionedCall"
_ASSIGNED = ("Assign", "ResourceScatter")
# Operations along an axis, and which of their inputs it is.
_ALONG_AN_AXIS = {
    **dict.fromkeys(("Cumprod", "Cumsum", "ReverseV2"), 1),
    **dict.fromkeys(("GatherV2", "Roll", "SplitV"), 2),
    "Split": 0,
}
_SUMS = frozenset({"Mean", "Prod", "Sum"})
# Operations that replicas may do each with its own part of a sum. The next ones
# if only one of their inputs is of rows; with True, the first.
_LINEAR = frozenset(
    {
        *("Add", "AddN", "AddV2", "BroadcastTo", "Cast", "CheckNumerics"),
        *("ConcatV2", "EnsureShape", "ExpandDims", "GatherV2", "Identity"),
        *("IdentityN", "Mean", "Neg", "Pack", "PreventGradient", "Reshape"),
        *("Split", "SplitV", "Squeeze", "StopGradient", "StridedSlice", "Sub"),
        *("Sum", "Tile", "Transpose", "Unpack"),
    }
)
_FACTORS = {
    **dict.fromkeys(("MatMul", "Mul", "MulNoNan"), False),
    **dict.fromkeys(("Div", "DivNoNan", "RealDiv"), True),
}
# Operations that make numbers of rows.
_OF_SHAPES = frozenset({"Prod", "Shape", "ShapeN", "Size"})
# After these another axis than the first may be of the rows; what functions and
# loops do isn't seen.
_MOVES = frozenset(
    {
        *("Einsum", "If", "PartitionedCall", "StatefulPartitionedCall"),
        *("StatelessIf", "StatelessWhile", "TensorListStack", "While"),
    }
)


def reason(
    model: keras.Model,
    element_spec: object,
    loss: Callable[[Any, Any], Any] | None = None,
) -> str | None:
    """Returns what a `train_step` does with several rows, or None.

    Or a `loss` of a model and a batch, in its place. Nothing can be said of
    what cannot be traced.

    Raises:
        ValueError: The step updates weights where replicas cannot meet.
    """
    found: list[str] = []
    is_apart = False

    def look(step: keras_internals.TracedStep) -> None:
        nonlocal is_apart
        graph = tf.compat.v1.get_default_graph()
        is_apart = any(
            value.graph is not graph for value in _tensors(step.applied)
        )
        if kind := _of_step(model, step):
            found.append(kind)

    try:
        keras_internals.trace_own_step(model, element_spec, look, loss)
    except Exception:  # Whatever it is, the step itself will say so.
        return None
    if is_apart:
        raise ValueError(
            "On several replicas a `train_step` must call its optimizer in the "
            "step itself, where they average gradients; received "
            f"{type(model).__name__}.train_step, which calls it in a `tf.cond`,"
            " a loop or a `tf.function`. To update after every n batches, "
            "leave the sums to Keras: "
            "`keras.optimizers.SGD(gradient_accumulation_steps=n)`; or train "
            "on one device."
        )
    return found[0] if found else None


def compares(model: keras.Model, data: object, results: object) -> bool:
    """Whether a call compares rows of the data, in the graph of a trace.

    Or makes its results by something of all rows, such as their mean.
    """
    rows = _tensors(data)
    after = metric_joins.operations_after(rows)
    if _are_compared(rows, after):
        return True
    sizes = _sizes(rows)
    asked = after & _operations_before(keras.tree.flatten(results))
    if any(
        operation.inputs[0].dtype.is_floating
        for operation in _reductions(model, asked, sizes)
    ):
        return True
    given = {value.op for value in rows}
    if any(_fixes_rows(operation, after | given) for operation in asked):
        return True
    known = given | metric_joins.operations_after(
        rows, until=functools.partial(_moves_rows, sizes=sizes)
    )
    return any(_takes_some(operation, known) for operation in asked)


def _reductions(
    model: keras.Model, operations: set[tf.Operation], sizes: set[int | None]
) -> list[tf.Operation]:
    """Returns those that make one value of all rows, of several operations."""
    # Replicas do these together.
    own = {
        layer.name
        for layer in keras_internals.all_layers(model)
        if isinstance(layer, keras.layers.BatchNormalization)
    }
    return [
        operation
        for operation in operations
        if global_batch.reduces_rows(operation)
        and _are_rows(operation.inputs[0].shape[0], sizes)
        # A layer that is called again has a number behind its name.
        and own.isdisjoint(re.split(r"(?:_\d+)?/", operation.name))
        and own.isdisjoint(operation.name.split("/"))
    ]


def _fixes_rows(operation: tf.Operation, after: set[tf.Operation]) -> bool:
    """Whether an operation on rows works for one number of rows only.

    It gives them a shape, or adds values of one, such as noise.
    """
    if operation.type != "Reshape" and operation.type not in _BESIDE:
        return False
    result = operation.outputs[0].shape
    return (
        bool(result.rank)
        and (result[0] or 0) > 1
        and any(
            value.shape.rank
            and value.shape[0] is None
            and (operation.type == "Reshape" or value.shape.rank == result.rank)
            for value in operation.inputs
            if value.op in after
        )
    )


def _moves_rows(operation: tf.Operation, sizes: set[int | None]) -> bool:
    """Whether the first axis of what it makes may be another than the rows."""
    if operation.type in _MOVES or not operation.outputs:
        return True
    size = operation.outputs[0].shape[:1]
    if not size.rank or not _are_rows(size[0], sizes):
        return True
    if operation.type == "MatMul":
        return bool(operation.get_attr("transpose_a"))
    if operation.type == "Pack":
        return operation.get_attr("axis") == 0
    return global_batch.moves_first_axis(operation)


def _takes_some(operation: tf.Operation, known: set[tf.Operation]) -> bool:
    """Whether it gives some rows, another order of them, or their sum.

    The rows are the first axis of what `known` operations make.
    """
    kind = operation.type
    value = next((each for each in operation.inputs if each.op in known), None)
    if value is None or not value.shape.rank:
        return False
    if not value.dtype.is_floating:
        # Others are of the places of values in ragged data.
        is_sum = kind in _SUMS and value.dtype.is_integer
        return is_sum and global_batch.reduces_rows(operation)
    if kind == "StridedSlice":
        is_new = operation.get_attr("new_axis_mask") & 1
        return not is_new and global_batch.cuts_rows(operation)
    if kind == "RandomShuffle":
        return True
    if kind not in _ALONG_AN_AXIS:
        return False
    if kind == "GatherV2" and (
        operation.inputs[0] is not value
        or operation.inputs[1].op.type == "Range"
        or operation.get_attr("batch_dims")
    ):
        return False
    axes = tf.get_static_value(operation.inputs[_ALONG_AN_AXIS[kind]])
    return axes is not None and 0 in np.ravel(axes) % value.shape.rank


def _are_compared(
    rows: list[tf.Tensor],
    after: set[tf.Operation],
    results: Iterable[Any] | None = None,
) -> bool:
    """Whether rows are compared for some results, or by default for any.

    `after` are the operations that the rows lead to.
    """
    sizes = _sizes(rows)
    found = set(after)
    if results is not None:
        found &= _operations_before(results)
    return any(_compares(each, after, sizes) for each in found)


def _sizes(rows: list[tf.Tensor]) -> set[int | None]:
    """The numbers of rows of a batch; None if they aren't known."""
    return {value.shape[0] for value in rows if value.shape.rank}


def _are_rows(size: int | None, sizes: set[int | None]) -> bool:
    # Or of two views of the rows, one after the other.
    return size is None or any(each and size % each == 0 for each in sizes)


def _tensors(data: object) -> list[tf.Tensor]:
    flat = keras.tree.flatten(data)
    return [value for value in flat if isinstance(value, tf.Tensor)]


def _of_step(
    model: keras.Model, step: keras_internals.TracedStep
) -> str | None:
    rows = _tensors(step.data)
    after = metric_joins.operations_after(rows)
    if _are_compared(rows, after, step.targets):
        return "compares rows with each other in its loss"
    asked = after & _operations_before(step.targets)
    of_rows = after | {value.op for value in rows}
    if any(_fixes_rows(operation, of_rows) for operation in asked):
        return "works for one batch size only"
    totals = [
        value
        for operation in _reductions(model, asked, _sizes(rows))
        if operation.inputs[0].dtype.is_floating or operation.type == "Sum"
        for value in operation.outputs
    ]
    if any(value.op.type not in ("Mean", "Sum") for value in totals) or (
        not _add_up(totals, step.targets, after)
    ):
        return "computes its loss from numbers of the whole batch"
    if _stay_sums(totals, step.losses, _sizes(rows)):
        return "adds up rows in its loss"
    applied = _tensors(step.applied)
    # In a `tf.function` it may compute them from rows.
    calls = _operations_before(applied, until=_CALLS) & after
    gradients = [
        *step.gradients,
        *(v for call in calls if call.type in _CALLS for v in call.outputs),
    ]
    after |= {value.op for value in gradients}
    after |= metric_joins.operations_after(gradients)
    if not _add_up(gradients, applied, after):
        return "changes the gradients, as by clipping them"
    own = _statistics(model)
    for variable, value in step.assigned:
        is_metric = variable.aggregation == "sum" or id(variable) in own
        if not is_metric and tf.is_tensor(value) and value.op in after:
            return f"assigns rows to the variable {variable.path!r}"
    for operation in tf.compat.v1.get_default_graph().get_operations():
        if operation in after and operation.type.startswith(_ASSIGNED):
            return "assigns rows to a variable"
    return None


def _add_up(
    parts: list[tf.Tensor], results: list[Any], after: set[tf.Operation]
) -> bool:
    """Whether results are linear in parts, of which each replica has its own.

    `after` are the operations that rows, or the parts, lead to.
    """
    asked = _operations_before(results, until=_CALLS)
    linear = metric_joins.operations_after(
        parts, until=lambda operation: not _is_linear(operation, after)
    )
    found = metric_joins.operations_after(parts)
    return not (found - linear) & asked


def _stay_sums(
    totals: list[tf.Tensor], losses: list[Any], sizes: set[int | None]
) -> bool:
    """Whether losses have sums over rows that no number of rows divides.

    Replicas count their losses by shares of the rows, as means over them.
    """
    sums = [value for value in totals if value.op.type == "Sum"]
    after = {value.op for value in sums}
    after |= metric_joins.operations_after(
        sums, until=functools.partial(_divides_by_size, sizes=sizes)
    )
    return any(value.op in after for value in _tensors(losses))


def _divides_by_size(operation: tf.Operation, sizes: set[int | None]) -> bool:
    if not _FACTORS.get(operation.type):
        return False
    divisor = operation.inputs[1]
    kinds = {each.type for each in _operations_before([divisor])}
    known = tf.get_static_value(divisor)
    return not kinds.isdisjoint(_OF_SHAPES) or (
        known is not None and known.size == 1 and known.item() in sizes
    )


def _is_linear(operation: tf.Operation, after: set[tf.Operation]) -> bool:
    kind = operation.type
    if kind in ("Select", "SelectV2"):
        return operation.inputs[0].op not in after
    if kind not in _FACTORS:
        return kind in _LINEAR
    one, other = (value.op in after for value in operation.inputs)
    return not other if _FACTORS[kind] else not (one and other)


def _statistics(model: keras.Model) -> set[int]:
    """The ids of variables of which replicas know what to make."""
    layers = keras_internals.all_layers(model)
    metrics = [m for layer in layers for m in keras_internals.metrics_of(layer)]
    kept = [
        each
        for each in layers
        if isinstance(each, keras.layers.BatchNormalization)
    ]
    return {
        id(variable)
        for owner in [*metrics, *model.metrics, *kept]
        for variable in owner.variables
    }


def _operations_before(
    tensors: Iterable[Any], until: Container[str] = ()
) -> set[tf.Operation]:
    """Returns what leads to some tensors, back to operations of some types."""
    found: set[tf.Operation] = set()
    left = [value.op for value in tensors if tf.is_tensor(value)]
    while left:
        operation = left.pop()
        if operation not in found:
            found.add(operation)
            if operation.type not in until:
                left += [value.op for value in operation.inputs]
    return found


def _compares(
    operation: tf.Operation,
    after: set[tf.Operation],
    sizes: set[int | None],
) -> bool:
    """Whether an operation has results of two rows, or of all of them.

    `sizes` are the numbers of rows of a batch. Layers multiply rows by weights,
    and attention multiplies parts of the same row.
    """
    if len(operation.inputs) < 2:
        return False
    one, other = operation.inputs[:2]
    if one.op not in after or other.op not in after:
        return False
    if one.shape.rank is None or other.shape.rank is None:
        return False

    are_rows = functools.partial(_are_rows, sizes=sizes)
    if operation.type == "MatMul":
        first = one.shape[int(operation.get_attr("transpose_a"))]
        last = other.shape[1 - int(operation.get_attr("transpose_b"))]
        summed = one.shape[1 - int(operation.get_attr("transpose_a"))]
        return are_rows(summed) or (are_rows(first) and are_rows(last))
    if operation.type == "Einsum":
        terms, result = operation.get_attr("equation").decode().split("->")
        labels = [term[:1] for term in terms.split(",")]
        if "." in terms or not all(labels):
            return False
        is_by_row = labels[0] == labels[1] and labels[0] in result
        return (
            not is_by_row
            and are_rows(one.shape[0])
            and are_rows(other.shape[0])
        )
    if operation.type in _BESIDE and min(one.shape.rank, other.shape.rank) > 1:
        shapes = [tuple(value.shape[:2]) for value in (one, other)]
        return any(
            a[0] == 1 and b[1] == 1 and are_rows(a[1]) and are_rows(b[0])
            for a, b in (shapes, shapes[::-1])
        )
    return False
