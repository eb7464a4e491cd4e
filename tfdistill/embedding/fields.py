"""From the ids of each field to ids, or keys, of one table; or a refusal."""

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

_MOST_IDS = 2**63 - 1


class FieldIds:
    """Turns each field's ids into ids of one table, or refuses them.

    Attributes:
        has_axis: Whether ids have an axis for fields.
        sizes: The number of ids of each field.
        num_rows: The number of all ids.
        names: What errors call the fields; by default, numbers.
        oov_index: What stands for ids that are out of range, if anything does.
    """

    def __init__(
        self, input_dim: int | Sequence[int], *, oov_index: int | None = None
    ) -> None:
        """Lays the fields, of these numbers of ids, one behind the other.

        An int means ids of one field, without an axis for fields. Ids out of a
        field's range become `oov_index`; by default they are an error.
        """
        sizes = [operator.index(size) for size in np.atleast_1d(input_dim)]
        if not sizes or min(sizes) < 1:
            raise ValueError(
                "`input_dim` must be an int >= 1 or a sequence of such ints; "
                f"received {sizes}. Give each field its number of ids."
            )
        if oov_index is not None and not 0 <= oov_index < min(sizes):
            raise ValueError(
                "`oov_index` must be an id of every field, in [0, "
                f"{min(sizes)}); received {oov_index}. Make `input_dim` one "
                "larger to have a row for it."
            )
        self.has_axis = np.ndim(input_dim) > 0
        self.sizes = sizes
        self.num_rows = sum(sizes)
        self.names = list(map(str, range(len(sizes))))
        self.oov_index = oov_index

    def along(self, ids: tf.Tensor, axis: int, *, owner: str) -> Any:
        """Returns the field of each id, int32 that broadcasts to `ids`.

        None if they have no axis for it. It is `axis`, -1 or -2. ValueError,
        which names the `owner` of the ids, if that axis has another size.
        """
        if not self.has_axis:
            return None
        num_fields = len(self.sizes)
        if (ids.shape.rank or 0) < -axis or ids.shape[axis] != num_fields:
            raise ValueError(
                f"Ids of {owner} must be "
                f"[..., {num_fields}{', k' if axis == -2 else ''}], one for "
                f"each field; received {ids.shape}. Stack the fields along "
                "that axis."
            )
        fields = tf.range(num_fields)
        return fields[:, tf.newaxis] if axis == -2 else fields

    def in_table(
        self, ids: tf.Tensor, fields: tf.Tensor | None, *, owner: str
    ) -> tf.Tensor:
        """Returns the ids' numbers in the table, int64 in [0, num_rows).

        `fields` broadcasts to `ids`, None if there is one field. When it
        runs, an id out of range is an InvalidArgumentError that names the
        `owner`, if there is no `oov_index`.
        """
        ids = self.checked(tf.cast(ids, tf.int64), fields, owner=owner)
        if fields is None:
            return ids
        offsets = [0, *itertools.accumulate(self.sizes[:-1])]
        return ids + tf.gather(tf.constant(offsets, tf.int64), fields)

    def checked(
        self, ids: tf.Tensor, fields: tf.Tensor | None, *, owner: str
    ) -> tf.Tensor:
        """Returns ids, int64, of which none is out of its field's range."""
        limits = tf.constant(self.sizes[0], tf.int64)
        if fields is not None:
            limits = tf.gather(tf.constant(self.sizes, tf.int64), fields)
        is_bad = tf.logical_or(ids < 0, ids >= limits)
        if self.oov_index is None:
            names = tf.constant(self.names)
            return _refuse(
                ids, limits, fields, is_bad, tf.constant(owner), names
            )
        return tf.where(is_bad, tf.cast(self.oov_index, tf.int64), ids)


class FieldKeys(FieldIds):
    """Turns each field's ids, of any size, into keys above 0."""

    def __init__(self, num_fields: int | None) -> None:
        """Lays the fields' ids one between the other; None is one, no axis."""
        number = num_fields or 1
        size = (_MOST_IDS - number) // number
        super().__init__([size] * num_fields if num_fields else size)

    def in_table(
        self, ids: tf.Tensor, fields: tf.Tensor | None, *, owner: str
    ) -> tf.Tensor:
        """Returns keys, int64; refuses ids that are negative or too large."""
        ids = self.checked(tf.cast(ids, tf.int64), fields, owner=owner)
        field = 0 if fields is None else tf.cast(fields, tf.int64)
        return ids * len(self.sizes) + field + 1

    def field_of(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns the fields of keys, int64."""
        return (keys - 1) % len(self.sizes)


# One trace serves all tables: the branches of a condition take long to trace.
@tf.function(autograph=False)
def _refuse(
    ids: tf.Tensor,
    limits: tf.Tensor,
    fields: tf.Tensor | None,
    is_bad: tf.Tensor,
    owner: tf.Tensor,
    names: tf.Tensor,
) -> tf.Tensor:
    """Returns the ids, behind a check that none is bad."""

    def complain() -> tf.Tensor:
        first = tf.where(is_bad)[0]
        parts = [limits, ids, *([] if fields is None else [fields])]
        limit, bad, *field = (
            tf.gather_nd(tf.broadcast_to(part, tf.shape(ids)), first)
            for part in parts
        )
        message = tf.strings.join(
            [
                *("Ids of ", owner, " must be >= 0 and < "),
                *(tf.as_string(limit), "; received ", tf.as_string(bad)),
                *((" in field ", tf.gather(names, *field)) if field else ()),
                ". Fix the data, or map such ids to one row with `oov_index`.",
            ]
        )
        with tf.control_dependencies([tf.debugging.Assert(False, [message])]):
            return tf.constant(False)

    fine = tf.cond(tf.reduce_any(is_bad), complain, lambda: tf.constant(True))
    # Without a dependency, the lookup might fail first and say less.
    with tf.control_dependencies([fine]):
        return tf.identity(ids)
