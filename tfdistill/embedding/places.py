"""Which row an id has: a column of keys beside the table.

The key of an id is a number above 0. It lies in one of a few places that
follow from the key alone: double hashing (Knuth, The Art of Computer
Programming 3, 6.4) within a region of the table, so that a server finds its
keys by itself, and places do not depend on how many servers there are. A place
holds 0 until its first key, and the key's negative while that waits to be
admitted. Place p is row p of the table.
"""

import dataclasses
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

Prepare = Callable[[tf.Tensor, tf.Tensor], list[Any]]
# With nine tenths of a table in use, one new key in a thousand finds all of
# these taken.
MOST_PROBES = 64
EVICTIONS = (None, "lru", "count")
# How long an id keeps its row at least: executions in flight may update it.
STEPS_KEPT = 64
_MOST_REGIONS, _FEWEST_ROWS = 64, 1024
# The factors of SplitMix64 (Steele et al. 2014).
_FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
# Most keys are where they are looked for first, the others looked for at once.
_PROBES_AT_ONCE = 8
# Costs of taking a place; the place of an admitted id costs something between.
_EMPTY, _OLD, _WAITS, _TAKEN = -(2**62), -(2**61), -(2**50), 2**62


@dataclasses.dataclass(frozen=True)
class Regions:
    """A table cut into regions of one size, a power of two.

    Attributes:
        number: How many there are.
        rows_each: Rows of each.
    """

    number: int
    rows_each: int

    @classmethod
    def of(cls, num_rows: int) -> "Regions":
        """Returns the regions of a table of at least this many rows."""
        least = max(_FEWEST_ROWS, -(-num_rows // _MOST_REGIONS))
        rows_each = 1 << (least - 1).bit_length()
        return cls(-(-num_rows // rows_each), rows_each)

    @property
    def num_rows(self) -> int:
        """Rows of all regions."""
        return self.number * self.rows_each

    def homes(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns where to look for keys first, int64."""
        mixed = _mixed(keys, _FACTORS[0])
        region = (_bits_from(40, mixed) * self.number) // 2**24
        return region * self.rows_each + _low(mixed, self.rows_each)

    def places(
        self, keys: tf.Tensor, homes: tf.Tensor, first: Any, count: int
    ) -> tf.Tensor:
        """Returns where else to look for keys, int64 `[n, count]`.

        From probe number `first` on; probe number 0 looks at home.
        """
        # An odd stride comes by all rows of a region.
        stride = _bits_from(32, keys * tf.constant(_FACTORS[1], tf.int64)) * 2
        probes = tf.range(count, dtype=tf.int64) + tf.cast(first, tf.int64)
        moved = homes[:, tf.newaxis] + probes * (stride + 1)[:, tf.newaxis]
        begin = homes - _low(homes, self.rows_each)
        return begin[:, tf.newaxis] + _low(moved, self.rows_each)


def _mixed(values: tf.Tensor, factor: int) -> tf.Tensor:
    """Multiplies modulo 2**64 and folds the high bits onto the low ones."""
    product = values * tf.constant(factor, tf.int64)
    return tf.bitwise.bitwise_xor(product, _bits_from(32, product))


def _bits_from(start: int, values: tf.Tensor) -> tf.Tensor:
    shifted = tf.bitwise.right_shift(values, tf.constant(start, tf.int64))
    return _low(shifted, 2**24)


def _low(values: tf.Tensor, size: int) -> tf.Tensor:
    """Returns values modulo a power of two."""
    return tf.bitwise.bitwise_and(values, tf.constant(size - 1, tf.int64))


def find(
    keys: tf.Tensor,
    regions: Regions,
    gather: Callable[[tf.Tensor], tf.Tensor],
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the places of keys, and what they hold: the key or its negative.

    int64 `[n]`; where a key has no place, what it holds is another one's, or 0.
    `gather` returns what places of any shape hold, int64.
    """
    homes = regions.homes(keys)
    held = gather(homes)
    is_it = tf.equal(tf.abs(held), keys)
    # Nothing was ever put behind an empty place.
    left = tf.where(~is_it & (held != 0))[:, 0]

    def more(probe: tf.Tensor, left: tf.Tensor, *_: object) -> tf.Tensor:
        return (probe < MOST_PROBES) & (tf.size(left) > 0)

    def look(
        probe: tf.Tensor, left: tf.Tensor, places: tf.Tensor, found: tf.Tensor
    ) -> Any:
        sought = tf.gather(keys, left)
        some = regions.places(
            sought, tf.gather(homes, left), probe, _PROBES_AT_ONCE
        )
        held = gather(some)
        is_it = tf.equal(tf.abs(held), sought[:, tf.newaxis])
        at = tf.where(is_it)
        who = tf.gather(left, at[:, 0])[:, tf.newaxis]
        places = tf.tensor_scatter_nd_update(
            places, who, tf.gather_nd(some, at)
        )
        found = tf.tensor_scatter_nd_update(found, who, tf.gather_nd(held, at))
        goes_on = tf.reduce_all(~is_it & (held != 0), axis=1)
        probe += _PROBES_AT_ONCE
        return probe, tf.boolean_mask(left, goes_on), places, found

    start = (tf.constant(1), left, homes, tf.where(is_it, held, 0))
    _, _, places, found = tf.while_loop(
        more,
        look,
        start,
        shape_invariants=(tf.TensorShape([]), *[tf.TensorShape([None])] * 3),
    )
    return places, found


@dataclasses.dataclass(frozen=True)
class Rules:
    """When ids get rows, and may lose them; see `DynamicEmbedding`."""

    admit_after: int = 1
    evict: str | None = None
    max_age_steps: int | None = None

    @property
    def columns(self) -> list[str]:
        """What must be known of an id: the step of its last use, its uses."""
        ages = self.evict is not None or self.max_age_steps is not None
        return ["last"] * (ages or self.counts) + ["count"] * self.counts

    @property
    def counts(self) -> bool:
        """Whether it matters how often an id is used."""
        return self.evict == "count" or self.admit_after > 1


def start_at(step: int, columns: Sequence[Mapping[str, tf.Variable]]) -> None:
    """Counts the steps of all uses from `step` of the training so far."""
    for own in columns:
        if "last" in own:
            own["last"].assign_sub(tf.fill(own["last"].shape, np.int64(step)))


class Column:
    """One shard of the keys, read and changed where it lies."""

    def __init__(
        self,
        variables: Mapping[str, tf.Variable],
        *,
        regions: Regions,
        rules: Rules,
        first_row: int,
        lock: tf.CriticalSection,
    ) -> None:
        """Takes variables int64 `[rows, 1]`: `keys` and `rules.columns`.

        Only in the `lock` does a key get another place.
        """
        self._variables = variables
        self._regions = regions
        self._rules = rules
        self._first_row = first_row
        self._lock = lock

    def use(
        self,
        keys: tf.Tensor,
        times: tf.Tensor,
        step: tf.Tensor,
        *,
        prepare: Prepare,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns which of some distinct keys have rows, bool, and these rows.

        Keys that are not there are put there if they can be, and admitted
        once they are used often enough. `times` says how often each is used in
        this step. All numbers are int64; rows count from the shard's first.
        `prepare` gives the rows of keys their first values, and returns the
        operations.
        """
        places, found = find(keys, self._regions, self._held)

        def keep() -> Any:
            self._note(places, times, step)
            return tf.ones_like(keys, tf.bool), self._rows(places)

        def change() -> Any:
            return self._lock.execute(
                lambda: self._change(keys, times, step, prepare)
            )

        return tf.cond(tf.reduce_all(found > 0), keep, change)

    def _change(
        self,
        keys: tf.Tensor,
        times: tf.Tensor,
        step: tf.Tensor,
        prepare: Prepare,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Does what `use` does, in the lock."""
        places, found = find(keys, self._regions, self._held)
        known = tf.where(found != 0)[:, 0]
        self._note(tf.gather(places, known), tf.gather(times, known), step)
        absent = tf.where(found == 0)[:, 0]
        placed = self._insert(
            tf.gather(keys, absent), tf.gather(times, absent), step
        )
        places = tf.tensor_scatter_nd_update(
            places, absent[:, tf.newaxis], placed
        )
        waits = tf.where((found <= 0) & (places >= 0))[:, 0]
        if self._rules.admit_after > 1:
            uses = self._held(tf.gather(places, waits), "count")
            waits = tf.boolean_mask(waits, uses >= self._rules.admit_after)
        new, admitted = tf.gather(places, waits), tf.gather(keys, waits)
        # No lookup finds a row before it is ready, and the result waits for
        # all that was written for it.
        with tf.control_dependencies(prepare(self._rows(new), admitted)):
            written = self._put("keys", new, admitted)
        has_row = tf.tensor_scatter_nd_update(
            found > 0, waits[:, tf.newaxis], tf.fill(tf.shape(waits), True)
        )
        with tf.control_dependencies(written):
            rows = self._rows(tf.boolean_mask(places, has_row))
            return tf.identity(has_row), rows

    def _insert(
        self, keys: tf.Tensor, times: tf.Tensor, step: tf.Tensor
    ) -> tf.Tensor:
        """Gives keys places in which they wait; -1 where all are taken."""
        # Every place in which a key may be: [n, probes].
        homes = self._regions.homes(keys)
        every = self._regions.places(keys, homes, 0, MOST_PROBES)
        count = tf.size(keys)

        def more(turn: tf.Tensor, goes_on: tf.Tensor, _: Any) -> tf.Tensor:
            return goes_on & (turn < MOST_PROBES)

        def give(turn: tf.Tensor, _: Any, places: tf.Tensor) -> Any:
            left = tf.where(places < 0)[:, 0]
            own = tf.gather(every, left)
            cost = self._cost(own, step)
            best = tf.argmin(cost, axis=1)
            is_free = tf.reduce_min(cost, axis=1) < _TAKEN
            target = tf.gather(own, best, batch_dims=1)
            # If several keys want one place, the first in the batch gets it.
            wants = tf.where(is_free)[:, 0]
            distinct, index = tf.unique(tf.gather(target, wants))
            first = tf.math.unsorted_segment_min(
                tf.range(tf.size(wants)), index, tf.size(distinct)
            )
            who = tf.gather(left, tf.gather(wants, first))
            writes = [
                *self._put("keys", distinct, -tf.gather(keys, who)),
                *self._put("last", distinct, step),
                *self._put("count", distinct, tf.gather(times, who)),
            ]
            places = tf.tensor_scatter_nd_update(
                places, who[:, tf.newaxis], distinct
            )
            with tf.control_dependencies(writes):
                goes_on = (tf.size(who) > 0) & (tf.size(who) < tf.size(left))
                return turn + 1, tf.identity(goes_on), places

        start = (tf.constant(0), count > 0, -tf.ones([count], tf.int64))
        return tf.while_loop(more, give, start)[-1]

    def _cost(self, places: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """Returns what it costs to take places, int64 of their shape.

        Of equal ones the first is meant, so that empty ones fill in order.
        """
        keys, rules = self._held(places), self._rules
        cost = tf.fill(tf.shape(keys), tf.constant(_TAKEN, tf.int64))
        if rules.columns:
            last = self._held(places, "last")
            if rules.evict is not None:
                by_age = rules.evict == "lru"
                score = last if by_age else self._held(places, "count")
                score += tf.cast(keys < 0, tf.int64) * _WAITS
                cost = tf.where(last < step - STEPS_KEPT, score, cost)
            if rules.max_age_steps is not None:
                is_young = last >= step - rules.max_age_steps
                cost = tf.where(is_young, cost, _OLD)
        return tf.where(keys != 0, cost, _EMPTY)

    def _note(
        self, places: tf.Tensor, times: tf.Tensor, step: tf.Tensor
    ) -> None:
        """Notes a use of keys."""
        self._put("last", places, step)
        if "count" in self._variables:
            tf.raw_ops.ResourceScatterAdd(
                resource=self._variables["count"].handle,
                indices=self._rows(places),
                updates=times[:, tf.newaxis],
            )

    def _held(self, places: tf.Tensor, name: str = "keys") -> tf.Tensor:
        found = tf.gather(self._variables[name], self._rows(places))
        return tf.squeeze(found, axis=-1)

    def _rows(self, places: tf.Tensor) -> tf.Tensor:
        return places - self._first_row

    def _put(self, name: str, places: tf.Tensor, values: Any) -> list[Any]:
        """Writes a column's values, if it is kept; returns the operation."""
        if name not in self._variables:
            return []
        values = tf.broadcast_to(values, tf.shape(places))
        written = tf.raw_ops.ResourceScatterUpdate(
            resource=self._variables[name].handle,
            indices=self._rows(places),
            updates=values[:, tf.newaxis],
        )
        return [written]
