"""Losses divided by the global batch, however it fell on the replicas.

Keras averages over each replica's own batch and divides by the number of
replicas. That is the mean over the global batch only while all replicas hold
equally many examples; a partial last batch, a mask or weights that are not
spread evenly make it a different loss. Here each replica's share is its own sum
over the global divisor, so that the shares add up to the one-process loss.
"""

import contextlib
import dataclasses
import inspect
import threading
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistill.cluster import replicas
from tfdistill.system import keras_internals
from tfdistill.training import metric_joins

_REDUCTIONS = ("Max", "Mean", "Min", "Prod", "Sum")


class _Active(threading.local):
    """The batch of the step that this thread traces or runs."""

    batch: "GlobalBatch | None" = None


_active = _Active()


@dataclasses.dataclass(frozen=True, kw_only=True)
class GlobalBatch:
    """How many examples of a step this replica and all hold, float32."""

    local: tf.Tensor
    total: tf.Tensor
    num_replicas: int
    # Whether this replica may hold none, as of a last batch that is small.
    may_be_empty: bool
    # Whether losses are now means over the rows here, not shares of a whole.
    is_alone: bool = False
    # Whether the rows of all replicas are here.
    is_whole: bool = False

    @classmethod
    def of(cls, inputs: object) -> "GlobalBatch":
        """Counts the examples of `inputs`; one small collective at most.

        `inputs` is a structure of dense, ragged or sparse tensors `[batch,
        ...]`. If the batch size is known while tracing, every replica holds
        that many and nothing is sent.
        """
        rows, is_known = num_rows(inputs)
        local = total = tf.cast(rows, tf.float32)
        num_replicas = 1
        if replicas.in_replica():
            num_replicas = tf.distribute.get_strategy().num_replicas_in_sync
            total = local * num_replicas if is_known else _sum(local)
        return cls(
            local=local,
            total=total,
            num_replicas=num_replicas,
            may_be_empty=num_replicas > 1 and not is_known,
        )

    @classmethod
    def gathered(cls, data: object) -> "tuple[GlobalBatch, Any]":
        """Returns all replicas' rows of a step's data, and the batch of them.

        Each replica then does what one process does, so that gradients are
        equal, and count alike.
        """
        _, data = of_all_replicas(data)
        inputs = keras.utils.unpack_x_y_sample_weight(data)[0]
        batch = cls.of(inputs)
        batch = dataclasses.replace(batch, may_be_empty=False, is_whole=True)
        return batch, data

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Makes this the batch that `GlobalBatchLoss` divides by."""
        outer = _active.batch
        _active.batch = self
        try:
            yield
        finally:
            _active.batch = outer

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Runs code that was written for one device on this replica's rows.

        Such code takes means over the rows that it gets. What it gives, a loss
        or gradients, counts by this replica's `share` of all rows: so every
        loss in it, compiled ones too, is such a mean.
        """
        alone = dataclasses.replace(self, is_alone=True)
        share = None if self.is_whole else self.share
        switch = keras_internals.losses_of_one_replica(share)
        with alone.scope(), switch:
            yield

    @property
    def share(self) -> tf.Tensor:
        """This replica's number of rows divided by the number of all rows."""
        return tf.math.divide_no_nan(self.local, self.total)

    def averaged(self, values: Sequence[Any]) -> list[Any]:
        """Averages replicas' losses or gradients by their rows; None stays."""
        cleaned = self.cleaned(values)
        parts = [_times(value, self.share) for value in cleaned]
        return summed_slices(parts) if self.is_whole else replicas.summed(parts)

    def share_of_added(
        self, loss: tf.Tensor, *, is_of_all: bool = False
    ) -> tf.Tensor:
        """This replica's share of what a layer has given `add_loss`.

        Keras adds up a loss of each row. Any other is a mean over rows, or of
        weights, which all replicas have; or it is a sum over rows. A layer that
        gets the rows of all replicas gives the same on each.
        """
        total = tf.reduce_sum(loss)
        if not is_of_all and (loss.shape.rank or _is_sum_of_rows(loss)):
            return total
        return tf.math.multiply_no_nan(total, tf.cast(self.share, total.dtype))

    @staticmethod
    def here() -> "GlobalBatch | None":
        """The batch in whose `scope` the code here runs, if there is one."""
        return _active.batch

    def cleaned(self, values: Sequence[Any]) -> list[Any]:
        """Returns losses or gradients, 0 for NaN if this replica has no rows.

        What is computed of no rows may be NaN: a mean over them is, and with
        it each gradient through batch normalization. What does not come from
        rows, as this replica's share of a regularizer, is kept.
        """
        if not self.may_be_empty:
            return list(values)
        dense = [value for value in values if isinstance(value, tf.Tensor)]
        if not dense:
            return list(values)
        found = tf.cond(
            self.local > 0,
            lambda: [tf.identity(value) for value in dense],
            lambda: [
                tf.where(tf.math.is_finite(value), value, tf.zeros_like(value))
                for value in dense
            ],
        )
        kept = iter(found)
        return [
            next(kept) if isinstance(value, tf.Tensor) else value
            for value in values
        ]

    def record(
        self, metrics: Sequence[keras.Metric], shares: Mapping[str, tf.Tensor]
    ) -> None:
        """Adds this replica's shares of a step's losses to means over examples.

        `shares` go by the names of `keras.metrics.Mean`s among `metrics`.
        """
        found = self.cleaned(list(shares.values()))
        for name, share in zip(shares, found, strict=True):
            mean = next((m for m in metrics if m.name == name), None)
            if mean is None:  # The model counts its loss itself.
                continue
            if share.shape.rank:  # `reduction=None`: a value a prediction.
                size = tf.cast(tf.reduce_prod(tf.shape(share)[1:]), share.dtype)
                total = tf.cast(self.total, share.dtype) * size
                share = tf.math.divide_no_nan(tf.reduce_sum(share), total)
            # Summed: loss * examples by examples, though a replica may hold
            # none.
            mean.update_state(
                share * self.num_replicas,
                sample_weight=self.total / self.num_replicas,
            )


@contextlib.contextmanager
def undone_unless(
    stays: Callable[[tf.Tensor], tf.Tensor], variables: Sequence[Any]
) -> Iterator[None]:
    """Takes back what a step assigns to variables where it doesn't stay.

    `stays` gets the new value; its booleans are one, or one for each element.
    """
    before = [tf.identity(variable.value) for variable in variables]
    yield
    for variable, value in zip(variables, before, strict=True):
        now = tf.convert_to_tensor(variable.value)
        variable.assign(tf.where(stays(now), now, value))


def summed_slices(parts: list[Any]) -> list[Any]:
    """Sums over replicas that all have slices of the same rows of a table.

    Keras' optimizers square each slice, so none may be there in parts.
    """
    kind = tf.IndexedSlices
    sums = replicas.summed(
        [p.values if isinstance(p, kind) else p for p in parts]
    )
    return [
        kind(total, part.indices, part.dense_shape)
        if isinstance(part, kind)
        else total
        for part, total in zip(parts, sums, strict=True)
    ]


def _times(value: tf.Tensor | None, share: tf.Tensor) -> Any:
    if value is None:
        return None
    factor = tf.cast(share, value.dtype)
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(
            value.values * factor, value.indices, value.dense_shape
        )
    return tf.convert_to_tensor(value) * factor


def _sum(value: tf.Tensor) -> tf.Tensor:
    """Sums over the replicas what a loss is divided by: a constant of it."""
    return tf.stop_gradient(replicas.summed([value])[0])


def num_rows(inputs: object) -> tuple[tf.Tensor, bool]:
    """Counts the examples here; and whether a trace knows their number."""
    first = next(v for v in keras.tree.flatten(inputs) if v is not None)
    is_known = bool(first.shape.rank and first.shape[0] is not None)
    if isinstance(first, tf.RaggedTensor):
        return first.nrows(), is_known
    if isinstance(first, tf.SparseTensor):
        return first.dense_shape[0], is_known
    return tf.shape(first)[0], is_known


def share_of_mean(values: tf.Tensor) -> tf.Tensor:
    """This replica's share of the mean of one value for each example."""
    batch = _active.batch or GlobalBatch.of(values)
    return tf.math.divide_no_nan(tf.reduce_sum(values), batch.total)


class GlobalBatchLoss(keras.losses.Loss):
    """Any Keras loss, reduced over the global batch.

    On one replica it is the wrapped loss itself. On several, each replica's
    value is its share: the shares add up to what one process would compute
    on the whole batch, for every Keras reduction, with masks and weights. A
    loss that gives one number for a batch, such as `Dice()`, or compares rows
    with each other, such as `Circle()`, is computed on the predictions of all
    replicas, which are gathered for it; any other needs no more than its sum.
    """

    def __init__(self, inner: keras.losses.Loss) -> None:
        super().__init__(name=inner.name, reduction=inner.reduction)
        self.inner = inner

    def __call__(
        self, y_true: object, y_pred: object, sample_weight: object = None
    ) -> Any:
        """Returns this replica's share of the loss, a float scalar."""
        if not replicas.in_replica():
            return self.inner(y_true, y_pred, sample_weight)
        batch = _active.batch or GlobalBatch.of(y_pred)
        if batch.is_whole:
            return self.inner(y_true, y_pred, sample_weight)
        if type(self.inner).__call__ is not keras.losses.Loss.__call__:
            return self._by_itself(y_true, y_pred, sample_weight, batch)
        mask = keras_internals.mask_of(y_pred)
        dtype = self.inner.dtype
        # Copies: what uses them in the graph is the loss, and nothing else.
        copies: list[tf.Tensor] = []

        def copied(value: tf.Tensor) -> tf.Tensor:
            copies.append(tf.identity(value))
            return copies[-1]

        y_true, y_pred = keras.tree.map_structure(
            lambda value: keras_internals.of_logits(
                keras.ops.convert_to_tensor(value, dtype=dtype), copied
            ),
            (y_true, y_pred),
        )
        values = self.inner.call(y_true, y_pred)
        is_of_columns = keras_internals.goes_over_rows(self.inner)
        is_whole = (
            is_of_columns
            or not values.shape.rank
            or _is_of_whole_batch(self.inner, copies)
        )
        is_gathered = is_whole and not batch.is_alone
        if is_gathered:
            # Such as a ratio of sums over the batch, or rows that are compared
            # with each other: it is found on the rows of all replicas.
            own, y_true = of_all_replicas(y_true)
            values = self.inner.call(y_true, outputs_of_all_replicas(y_pred))
            if is_of_columns:
                is_sum = self.reduction == "sum"
                reduce = tf.reduce_sum if is_sum else tf.reduce_mean
                values = reduce(values)
        # As Keras: what a loss leaves out itself, such as `ignore_class`.
        out = keras_internals.mask_of(values)
        if is_gathered and values.shape.rank:
            values = values[own]
            out = None if out is None else out[own]
        if out is not None:
            mask = out if mask is None else tf.logical_and(mask, out)
        share = _share(values, sample_weight, mask, self.reduction, batch)
        if not batch.is_alone:
            return share
        return tf.math.divide_no_nan(share, tf.cast(batch.share, share.dtype))

    def _by_itself(
        self,
        y_true: object,
        y_pred: object,
        sample_weight: object,
        batch: GlobalBatch,
    ) -> Any:
        """A loss with a `__call__` of a user's: it reduces what it is given."""
        if batch.is_alone:
            return self.inner(y_true, y_pred, sample_weight)
        own, (y_true, sample_weight) = of_all_replicas((y_true, sample_weight))
        y_pred = outputs_of_all_replicas(y_pred)
        value = self.inner(y_true, y_pred, sample_weight)
        if value.shape.rank:
            return value[own]
        share = tf.cast(batch.share, value.dtype)
        return tf.math.multiply_no_nan(value, share)

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> Any:
        """Returns the wrapped loss's values before any reduction."""
        return self.inner.call(y_true, y_pred)


@contextlib.contextmanager
def metrics_of_all_rows() -> Iterator[None]:
    """Gives metrics of one number a batch the rows of all replicas."""
    is_whole = _active.batch is not None and _active.batch.is_whole
    if is_whole or not replicas.in_replica():
        yield
        return
    with keras_internals.metrics_gather(
        lambda values: of_all_replicas(values)[1]
    ):
        yield


def _is_of_whole_batch(loss: keras.losses.Loss, given: list[tf.Tensor]) -> bool:
    """Whether a loss of one number a row depends on the other rows, too.

    `Circle` does. In the graph of any other loss that isn't from Keras, which
    has just been traced, there are products of `given` with itself, all rows
    beside each one, or reductions over the rows.
    """
    function = keras_internals.function_of(loss)
    if function is keras.losses.circle:
        return True
    source = function or type(loss)
    # Others, such as a partial function, have no module.
    is_plain = inspect.isfunction(source) or inspect.isclass(source)
    home = f"{source.__module__}" if is_plain else ""
    if tf.executing_eagerly() or home.startswith(("keras.", "tfdistill.")):
        return False
    after = metric_joins.operations_after(given)
    return any(_mixes_rows(operation, after) for operation in after)


def _is_sum_of_rows(loss: tf.Tensor) -> bool:
    """Whether a number is a sum over rows, perhaps times another number.

    By the graph. There the numbers of weights are known, but not of rows.
    """
    if tf.executing_eagerly():
        return False
    operation = loss.op
    while operation.type != "Sum":
        left = [v for v in operation.inputs if tf.get_static_value(v) is None]
        is_division = operation.type == "RealDiv"
        if is_division and left[:1] != list(operation.inputs)[:1]:
            return False
        if operation.type in ("Cast", "Identity", "Neg", "Reshape"):
            left = list(operation.inputs)[:1]
        elif operation.type not in ("Mul", "RealDiv") or len(left) != 1:
            return False
        operation = left[0].op
    value, axes = operation.inputs[0], tf.get_static_value(operation.inputs[1])
    if axes is None or not value.shape.rank:
        return False
    return value.shape[0] is None and 0 in np.ravel(axes) % value.shape.rank


def _mixes_rows(operation: tf.Operation, after: set[tf.Operation]) -> bool:
    kind = operation.type
    if kind == "MatMul":
        return all(each.op in after for each in operation.inputs)
    return (
        moves_first_axis(operation)
        or cuts_rows(operation)
        or reduces_rows(operation)
    )


def moves_first_axis(operation: tf.Operation) -> bool:
    """Whether an operation puts another axis in the first one's place."""
    if operation.type == "Transpose":
        return _axes(operation)[:1] not in ([], [0])
    if operation.type == "ExpandDims":  # By the place among resulting axes.
        known = tf.get_static_value(operation.inputs[1])
        return known is not None and 0 in np.ravel(known)
    return False


def cuts_rows(operation: tf.Operation) -> bool:
    """Whether an operation is a slice of some rows, or adds an axis before."""
    if operation.type != "StridedSlice":
        return False
    first = {
        name: operation.get_attr(f"{name}_mask") & 1
        for name in ("begin", "ellipsis", "end", "new_axis")
    }
    is_all = first["begin"] and first["end"] and not first["new_axis"]
    return not (first["ellipsis"] or is_all)


def reduces_rows(operation: tf.Operation) -> bool:
    """Whether an operation makes one value of all rows of its first input."""
    return operation.type in _REDUCTIONS and 0 in _axes(operation)


def _axes(operation: tf.Operation) -> list[int]:
    """The axes that it reduces or transposes; none if they aren't known."""
    rank = operation.inputs[0].shape.rank
    known = tf.get_static_value(operation.inputs[1])
    if known is None or rank is None:
        return []
    return [int(axis) % max(rank, 1) for axis in np.ravel(known)]


def outputs_of_all_replicas(y_pred: object) -> Any:
    """Returns all replicas' rows of outputs, with the logits under them."""
    return keras.tree.map_structure(
        lambda value: keras_internals.of_logits(
            value, lambda rows: of_all_replicas(rows)[1]
        ),
        y_pred,
    )


def of_all_replicas(
    values: object, *, are_alike: bool = True
) -> tuple[slice, Any]:
    """Returns which rows are this replica's, and the rows of all replicas.

    A gradient comes back to the replica that holds them. Where a number of rows
    is known, each replica has as many if they `are_alike`.

    By a sum of rows and zeros: on several workers TensorFlow's own gathering
    fails in a traced step ("destinations can not be empty").
    """
    context = tf.distribute.get_replica_context()
    num_replicas = context.num_replicas_in_sync
    own = context.replica_id_in_sync_group
    flat = keras.tree.flatten(values)
    given = [value for value in flat if value is not None]
    sizes = tf.stack([tf.cast(tf.shape(v)[0], tf.float32) for v in given])
    # By replica, then by value: zipped data may differ in their rows.
    counts = _sum(tf.one_hot(own, num_replicas)[:, None] * sizes)
    before, ends, totals = (
        tf.cast(tf.reduce_sum(part, axis=0), tf.int32)
        for part in (counts[:own], counts[: own + 1], counts)
    )

    def padded(index: int, value: tf.Tensor) -> tf.Tensor:
        around = [before[index], totals[index] - ends[index]]
        value = replicas.gatherable(value)
        return tf.pad(value, [around, *[[0, 0]] * (value.shape.rank - 1)])

    sums = replicas.summed([padded(*each) for each in enumerate(given)])
    for value, total in zip(given, sums, strict=True):
        size = value.shape[0] if are_alike else None
        total.set_shape(
            [None if size is None else size * num_replicas, *value.shape[1:]]
        )
    whole = iter(
        tf.cast(total, value.dtype)
        for value, total in zip(given, sums, strict=True)
    )
    found = [None if value is None else next(whole) for value in flat]
    rows = slice(before[-1], ends[-1])
    return rows, keras.tree.pack_sequence_as(values, found)


def _share(
    values: tf.Tensor,
    sample_weight: object,
    mask: tf.Tensor | None,
    reduction: str | None,
    batch: GlobalBatch,
) -> tf.Tensor:
    """Reduces as `keras.losses.Loss` does, with divisors summed globally."""
    if values.shape.rank == 0:
        # The loss reduced by itself: taken as a mean over its batch, which
        # Keras multiplies by the mean weight.
        share = tf.cast(batch.local / batch.total, values.dtype)
        if sample_weight is not None:
            weight = tf.reduce_mean(tf.cast(sample_weight, values.dtype))
            share = tf.math.multiply_no_nan(weight, share)
        return tf.math.multiply_no_nan(values, share)
    weights = None
    if sample_weight is not None:
        weights = tf.cast(sample_weight, values.dtype)
        values, weights = _same_rank(values, weights)
    float_mask = None
    if mask is not None:
        float_mask = tf.cast(mask, values.dtype)
        values, float_mask = _same_rank(values, float_mask)
        weights = float_mask if weights is None else weights * float_mask
    weighted = values if weights is None else values * weights
    if reduction in (None, "none"):
        return weighted
    total = tf.reduce_sum(weighted)
    if reduction == "sum":
        return total
    if reduction == "mean_with_sample_weight" and weights is not None:
        return tf.math.divide_no_nan(total, _sum(tf.reduce_sum(weights)))
    per_example = tf.cast(tf.reduce_prod(tf.shape(values)[1:]), values.dtype)
    divisor = tf.cast(batch.total, values.dtype) * per_example
    if float_mask is not None and reduction != "mean_with_sample_weight":
        size = tf.cast(tf.size(float_mask), values.dtype)
        counts = _sum(tf.stack([tf.reduce_sum(float_mask), size]))
        divisor *= tf.math.divide_no_nan(counts[0], counts[1])
    return tf.math.divide_no_nan(total, divisor)


def _same_rank(
    first: tf.Tensor, second: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Adds or removes a last dimension of one, as Keras' losses do."""
    difference = first.shape.rank - second.shape.rank
    if difference == 1:
        if first.shape[-1] == 1 and second.shape.rank != 1:
            return tf.squeeze(first, -1), second
        return first, tf.expand_dims(second, -1)
    if difference == -1 and second.shape[-1] == 1:
        return first, tf.squeeze(second, -1)
    return first, second


def over_global_batch(loss: object) -> Any:
    """Wraps what `compile(loss=...)` takes in `GlobalBatchLoss`, leaf by leaf.

    A leaf is a loss, its name, a function of `(y_true, y_pred)` or None.
    """
    if isinstance(loss, dict):
        return {key: over_global_batch(value) for key, value in loss.items()}
    if isinstance(loss, (list, tuple)):
        return type(loss)(over_global_batch(value) for value in loss)
    if loss is None or isinstance(loss, GlobalBatchLoss):
        return loss
    return GlobalBatchLoss(keras_internals.loss_of(loss))
