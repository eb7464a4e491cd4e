"""From the ids of each field to ids, or keys, of one table; or a refusal."""

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

_MOST_IDS = 2**63 - 1


class FieldIds:
    """Turns each field's ids into ids of one table, or refuses them."""

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        oov_index: int | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        """Lays the fields, of these numbers of ids, one behind the other.

        Ids out of a field's range become `oov_index`; by default they are an
        error.
        """
        if not sizes or min(sizes) < 1:
            raise ValueError(
                "`input_dim` must be an int >= 1 or a sequence of such ints; "
                f"received {list(sizes)}. Give each field its number of ids."
            )
        if oov_index is not None and not 0 <= oov_index < min(sizes):
            raise ValueError(
                "`oov_index` must be an id of every field, in [0, "
                f"{min(sizes)}); received {oov_index}. Make `input_dim` one "
                "larger to have a row for it."
            )
        self.sizes = tuple(sizes)
        self.num_rows = sum(sizes)
        self._names = list(names or map(str, range(len(self.sizes))))
        self._oov_index = oov_index

    def along(self, ids: tf.Tensor, axis: int, *, owner: str) -> tf.Tensor:
        """Returns the field of each id, int32 that broadcasts to `ids`.

        The fields lie along `axis`, -1 or -2. ValueError, which names the
        `owner` of the ids, if that axis has another size.
        """
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
        if self._oov_index is None:
            names = tf.constant(self._names)
            return _refuse(
                ids, limits, fields, is_bad, tf.constant(owner), names
            )
        return tf.where(is_bad, tf.cast(self._oov_index, tf.int64), ids)


class FieldKeys(FieldIds):
    """Turns each field's ids, of any size, into keys above 0."""

    def __init__(self, num_fields: int) -> None:
        """Lays the fields' ids one between the other."""
        super().__init__([(_MOST_IDS - num_fields) // num_fields] * num_fields)

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
    fields: Any,
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
