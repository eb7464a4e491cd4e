"""The rows on which a student and its teachers are to agree.

Two students that agree on the rows of their batches may differ on others: a
model that knows its rows by heart predicts there what the labels say, and so
does its teacher. A row that is mixed of two others is new to both. With one
fixed teacher that is known to help (Beyer et al. 2022, arXiv:2106.05237,
"function matching" by mixup).

Neighbours in the batch are mixed, and one draw serves a whole step, so that a
batch gives the same rows however it is shared among replicas.
"""

import dataclasses
import math
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill.system import keras_internals
from tfdistill.training import global_batch

BATCH, MIXED, BOTH = KINDS = "batch", "mixed", "both"
# The name of what a step reports of them: of how many predictions, and of how
# many sequences of unknown length.
REPORT = "rows"
_MOST_ROWS, _FEW_ROWS = 256, 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of one replica that teachers are asked about.

    Attributes:
        inputs: `[rows, ...]`, structured as the student takes them.
        outputs: What the student answers.
        taught: Its outputs that learn from teachers, or auxiliary
            heads in their place.
        sample_weight: As in the data: None, a tensor, or by output.
        targets: The labels of the first rows; None if no row has one.
        count: What losses of these rows are divided by.
    """

    inputs: Any
    outputs: Any
    taught: Any
    sample_weight: Any
    targets: Any
    count: global_batch.GlobalBatch


def checked(agree_on: object, teachers: Iterable[Any]) -> Any:
    """Returns what `CodistillModel(agree_on=...)` was given, if it fits."""
    bound = [each.name for each in teachers if not each.answers_every_row]
    if bound and agree_on != BATCH:
        raise ValueError(
            f"`agree_on` must be 'batch' beside {', '.join(bound)}, which may "
            f"not have answers for other rows; received {agree_on!r:.100}."
        )
    if isinstance(agree_on, tf.data.Dataset):
        if agree_on.cardinality() == 0:
            raise ValueError(
                "`agree_on` must hold at least one batch; received an empty "
                "data set."
            )
        return agree_on
    if agree_on in KINDS or callable(agree_on):
        return agree_on
    raise ValueError(
        f"`agree_on` must be one of {', '.join(map(repr, KINDS))}, a function "
        "that returns other rows of the batch's inputs, or a tf.data.Dataset "
        f"of batches of inputs; received {agree_on!r:.100}."
    )


def check_inputs(agree_on: object, input_spec: object) -> None:
    """Checks that a data set holds batches of a student's inputs only."""
    if not isinstance(agree_on, tf.data.Dataset):
        return
    found = agree_on.element_spec
    wanted, given = map(keras.tree.flatten_with_path, (input_spec, found))
    fits = [path for path, _ in wanted] == [path for path, _ in given]
    if not fits or not all(
        _is_alike(own, other)
        for (_, own), (_, other) in zip(wanted, given, strict=True)
    ):
        raise ValueError(
            "`agree_on` must be a data set of batches of the student's inputs, "
            f"each as {_said(input_spec)}; received {_said(found)}. Leave out "
            "labels, as by `dataset.map(lambda x, y: x)`, and batch the rows."
        )


def given(rows: object) -> Callable[[Any], Any]:
    """Returns what `asked` takes of a step that got rows beside its batch."""
    return lambda inputs: rows


def asked(
    agree_on: object,
    batch: Rows,
    run: Callable[[Any], tuple[Any, Any]],
    step: tf.Tensor,
) -> Rows:
    """Returns the rows that teachers are asked about, in place of a batch.

    `agree_on` is what `checked` returned, or `given` for a data set. `run`
    returns a student's outputs for inputs, and those that are taught.
    """
    if isinstance(agree_on, tf.data.Dataset):
        raise ValueError(
            "Only `fit` reads the rows of a data set in `agree_on`; received "
            "a step without any. Call `fit`."
        )
    if agree_on == BATCH:
        return batch
    if callable(agree_on):
        inputs, weight = agree_on(batch.inputs), None
    else:
        _check_dense(batch.inputs)
        inputs = mixed(batch.inputs, step)
        weight = _of(_mean_of_pairs, batch.sample_weight)
    outputs, taught = run(inputs)
    if agree_on != BOTH:
        return Rows(
            inputs=inputs,
            outputs=outputs,
            taught=taught,
            sample_weight=weight,
            targets=None,
            count=global_batch.GlobalBatch.of(inputs),
        )
    # Every second row and one of each pair: as many as the batch has.
    return Rows(
        inputs=_joined(batch.inputs, inputs),
        outputs=_joined(batch.outputs, outputs),
        taught=_joined(batch.taught, taught),
        sample_weight=_joined(batch.sample_weight, weight),
        targets=_of(lambda values: values[::2], batch.targets),
        count=batch.count,
    )


def mixed(inputs: object, step: tf.Tensor) -> Any:
    """Returns one row for each two neighbors of a batch.

    Each column comes from one of the two: each of a table's features, each
    position of a text. Pictures, which are all of four axes or more, and
    sequences of floats are a weighted sum of both. The draw depends on the
    step and on the place in the inputs, a structure of dense tensors.
    """
    flat = keras.tree.flatten(inputs)
    found = [_mixed(values, step, index) for index, values in enumerate(flat)]
    return keras.tree.pack_sequence_as(inputs, found)


def reported(
    rows: Rows,
    asked: tf.Tensor | None,
    answers: Sequence[Sequence[tf.Tensor]],
) -> list[Any]:
    """Returns what a step reports of one replica; empty for several outputs.

    Which teachers were `asked`; the labels, which the first rows have; what
    the student and each teacher predict; and of a mask, or else of weights,
    which predictions count.
    """
    labels, own, weights = map(
        keras.tree.flatten, (rows.targets, rows.outputs, rows.sample_weight)
    )
    is_one = len(labels) == len(own) == 1 and len(weights) <= 1
    if not is_one or not isinstance(labels[0], tf.Tensor):
        return []
    counts = [w for w in weights if w is not None]
    mask = keras_internals.mask_of(own[0])
    if mask is not None:
        counts = [mask]
    sizes = own[0].shape[1:-1]
    num_rows = _FEW_ROWS
    if sizes.is_fully_defined():
        num_rows = max(1, _MOST_ROWS // math.prod(sizes.as_list()))
    found = [labels[0], own[0], *answers[0], *counts]
    lengths = {value.shape[0] for value in found}
    if len(lengths) == 1 and 0 < (own[0].shape[0] or 0) <= num_rows:
        return [asked, *found]  # Each operation costs time.
    num_rows = tf.minimum(num_rows, tf.shape(labels[0])[0])
    return [asked, *(value[:num_rows] for value in found)]


def _is_alike(wanted: Any, given: Any) -> bool:
    if type(wanted) is not type(given) or wanted.dtype != given.dtype:
        return False
    rows = tf.TensorShape([None, *wanted.shape[1:]])
    return bool(given.shape.is_compatible_with(rows))


def _said(spec: object) -> str:
    """Returns a spec as messages have it: dtypes and shapes, in a structure."""
    said = keras.tree.map_structure(
        lambda each: f"{each.dtype.name} {each.shape}", spec
    )
    return str(said).replace("'", "")


def _check_dense(inputs: object) -> None:
    flat = keras.tree.flatten(inputs)
    if not all(isinstance(v, tf.Tensor) and v.shape.rank for v in flat):
        raise ValueError(
            "Only dense tensors can be mixed; received inputs of types "
            f"{', '.join(type(each).__name__ for each in flat)}. Pass "
            "agree_on='batch', or a function that returns its own rows."
        )


def _pairs(values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    second = values[1::2]
    rows = second.shape[0]
    return values[::2][: tf.shape(second)[0] if rows is None else rows], second


def _mixed(values: tf.Tensor, step: tf.Tensor, index: int) -> tf.Tensor:
    first, second = _pairs(values)
    rank, dtype = values.shape.rank or 0, values.dtype
    seed = tf.stack([tf.cast(step, tf.int32), index])
    if rank >= 4 or (rank == 3 and dtype.is_floating):
        share = tf.random.stateless_uniform([], seed)
        sums = share * tf.cast(first, tf.float32)
        sums += (1 - share) * tf.cast(second, tf.float32)
        return tf.cast(sums if dtype.is_floating else tf.round(sums), dtype)
    of_first = tf.random.stateless_uniform(tf.shape(values)[1:], seed) < 0.5
    return tf.where(of_first, first, second)


def _mean_of_pairs(values: tf.Tensor) -> tf.Tensor:
    first, second = (tf.cast(part, tf.float32) for part in _pairs(values))
    return (first + second) / 2


def _of(function: Callable[[Any], Any], structure: object) -> Any:
    return keras.tree.map_structure(
        lambda values: None if values is None else function(values), structure
    )


def _joined(batch: Any, others: Any) -> Any:
    """Returns every second row of a batch, then the others."""

    def both(values: tf.Tensor | None, other: tf.Tensor | None) -> Any:
        if values is None:
            return None
        joined = tf.concat([values[::2], tf.cast(other, values.dtype)], 0)
        masks = [*map(keras_internals.mask_of, (values, other))]
        if all(mask is not None for mask in masks):
            joined._keras_mask = tf.concat([masks[0][::2], masks[1]], 0)
        return joined

    return keras.tree.map_structure(both, batch, others)
