"""Ids of several fields in one table: checked, mapped, moved by offsets."""

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf


class FieldIds:
    """Turns each field's ids into ids of one table, or refuses them.

    Attributes:
        sizes: Number of ids of each field.
        num_rows: Their sum: rows of the table.
    """

    def __init__(
        self, sizes: Sequence[int], *, oov_index: int | None = None
    ) -> None:
        """Lays the fields one behind the other.

        Args:
            sizes: Number of ids of each field, each >= 1.
            oov_index: What ids out of a field's range become; by default
                they are an error.

        Raises:
            ValueError: No field, an empty one, or an `oov_index` that not
                every field has.
        """
        if not sizes or min(sizes) < 1:
            raise ValueError(
                "`input_dim` must be an int >= 1 or a sequence of these; "
                f"received {list(sizes)}. Give each field its number of ids."
            )
        if oov_index is not None and not 0 <= oov_index < min(sizes):
            raise ValueError(
                "`oov_index` must be an id of every field, in "
                f"[0, {min(sizes)}); received {oov_index}. Enlarge "
                "`input_dim` by one for it."
            )
        self.sizes = tuple(sizes)
        self.num_rows = sum(sizes)
        self._oov_index = oov_index

    def along(self, ids: tf.Tensor, axis: int, *, owner: str) -> tf.Tensor:
        """Returns the field of each id where the fields lie along an axis.

        Args:
            ids: Tensor with one entry for each field along `axis`.
            axis: -1 or -2.
            owner: Whose ids they are, for messages.

        Returns:
            int32 tensor that broadcasts to `ids`.

        Raises:
            ValueError: That axis has another size.
        """
        num_fields = len(self.sizes)
        if (ids.shape.rank or 0) < -axis or ids.shape[axis] != num_fields:
            raise ValueError(
                f"Ids of {owner} must be "
                f"[..., {num_fields}{', k' if axis == -2 else ''}], one for "
                f"each entry of `input_dim`; received {ids.shape}. Stack the "
                "fields along that axis."
            )
        fields = tf.range(num_fields)
        return fields[:, tf.newaxis] if axis == -2 else fields

    def in_table(
        self, ids: tf.Tensor, fields: tf.Tensor | None, *, owner: str
    ) -> tf.Tensor:
        """Returns the ids' numbers in the table.

        Args:
            ids: int32 or int64 tensor of any shape.
            fields: Integer tensor that broadcasts to `ids`: the field of each
                one. None where there is one field.
            owner: Whose ids they are, for messages.

        Returns:
            int64, of the shape of `ids`, in [0, num_rows).

        Raises:
            tf.errors.InvalidArgumentError: When it runs: an id is out of
                range and there is no `oov_index`.
        """
        ids = tf.cast(ids, tf.int64)
        limits = tf.constant(self.sizes[0], tf.int64)
        if fields is not None:
            limits = tf.gather(tf.constant(self.sizes, tf.int64), fields)
        is_bad = tf.logical_or(ids < 0, ids >= limits)
        if self._oov_index is None:
            ids = _refuse(ids, limits, fields, is_bad, owner)
        else:
            ids = tf.where(is_bad, tf.cast(self._oov_index, tf.int64), ids)
        if fields is None:
            return ids
        offsets = [0, *itertools.accumulate(self.sizes[:-1])]
        return ids + tf.gather(tf.constant(offsets, tf.int64), fields)


def _refuse(
    ids: tf.Tensor,
    limits: tf.Tensor,
    fields: Any,
    is_bad: tf.Tensor,
    owner: str,
) -> tf.Tensor:
    """Returns the ids, behind a check that none is bad."""

    def complain() -> tf.Tensor:
        first = tf.where(is_bad)[0]
        parts = [
            f"Ids of {owner} must be >= 0 and < ",
            tf.gather_nd(tf.broadcast_to(limits, tf.shape(ids)), first),
            "; received ",
            tf.gather_nd(ids, first),
        ]
        if fields is not None:
            every = tf.broadcast_to(fields, tf.shape(ids))
            parts += [" in field ", tf.gather_nd(every, first)]
        parts.append(". Mend the data, or map such ids to one by `oov_index`.")
        message = tf.strings.join(
            [
                p if isinstance(p, str) else tf.strings.as_string(p)
                for p in parts
            ]
        )
        with tf.control_dependencies([tf.debugging.Assert(False, [message])]):
            return tf.constant(False)

    fine = tf.cond(tf.reduce_any(is_bad), complain, lambda: tf.constant(True))
    # Without a dependency, the lookup might fail first and say less.
    with tf.control_dependencies([fine]):
        return tf.identity(ids)
