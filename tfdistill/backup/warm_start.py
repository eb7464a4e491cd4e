"""What a new training takes over from the backup of an earlier one.

Weights and the optimizer's slots, in the order of the variables. Rows of a
table follow their ids: another number of rows lies in another order.
"""

import dataclasses
import itertools
import operator
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tfdistill.backup import store
from tfdistill.embedding import rows as table_rows
from tfdistill.embedding import tables
from tfdistill.system import keras_internals


def choose(
    directory: str, gather: store.Gather, *, is_chief: bool
) -> store.Chosen:
    """Returns the newest complete backup there, the same on all workers."""
    backups = store.BackupStore(directory, removes_damaged=False)
    found = store.choose(backups, gather, is_chief=is_chief)
    if found is None:
        raise ValueError(
            "`warm_start` must be the directory of another training's Backup; "
            f"received {directory}, which contains no complete backup."
        )
    return found


def slots_of(optimizer: keras.Optimizer, trainable: Sequence[Any]) -> list[Any]:
    """Returns what an optimizer keeps for variables, by Keras' names for it.

    Neither its counters nor its rate, nor sums of gradients in progress.
    """
    prefixes = tuple(_prefix(variable) for variable in trainable)
    return [
        variable
        for variable in optimizer.variables
        if variable.name.startswith(prefixes)
        and not variable.name.endswith("gradient_accumulator")
    ]


def _prefix(variable: keras.Variable) -> str:
    return f"{variable.path.replace('/', '_')}_"


def keras_tables(
    model: keras.Model, keys: Mapping[int, str]
) -> list[dict[str, Any]]:
    """Describes Keras' own embeddings; `keys` are of variables by their id."""
    found: dict[str, dict[str, Any]] = {}
    for layer in keras_internals.all_layers(model):
        if not isinstance(layer, keras.layers.Embedding):
            continue
        table: Any = layer.embeddings
        if not keys.get(id(table), "").startswith("trainable/"):
            continue
        slots = [
            keys[id(slot)]
            for slot in slots_of(model.optimizer, [table])
            if slot.shape == table.shape and id(slot) in keys
        ]
        found[keys[id(table)]] = {
            "sizes": [int(table.shape[0])],
            "sharding": "contiguous",
            "parts": [[key] for key in (keys[id(table)], *slots)],
        }
    return list(found.values())


def _stored_rows(table: Mapping[str, Any], ids: np.ndarray) -> np.ndarray:
    """Returns the rows of a table's ids; or, by id, its rows as they lie."""
    if table["sharding"] == tables.BY_ID:
        return ids
    layout = table_rows.RowLayout(
        sum(table["sizes"]), sharding=table["sharding"]
    )
    return layout.storage_rows(ids).numpy()


@dataclasses.dataclass(frozen=True)
class Both:
    """A part of the backup, and of this training; None if one lacks it."""

    theirs: Any
    ours: Any

    def each(self, parts: Callable[[Any], Iterable[Any]]) -> Iterable["Both"]:
        """Pairs their parts, by the order that they are in."""
        found = itertools.zip_longest(parts(self.theirs), parts(self.ours))
        return itertools.starmap(Both, found)

    @property
    def is_there(self) -> bool:
        """Whether neither lacks it."""
        return self.theirs is not None and self.ours is not None

    def are_equal(self, *names: str) -> bool:
        """Whether a table is as it was by some names."""
        return all(self.theirs[name] == self.ours[name] for name in names)

    def fits(self, specs: "Both") -> bool:
        """Whether each field of a table has at least as many ids as before.

        And rows and slots of the same kind.
        """
        if not self.is_there:
            return False
        before, now = self.theirs["sizes"], self.ours["sizes"]
        kinds = [
            [
                (found[keys[0]]["shape"][1:], found[keys[0]]["dtype"])
                for keys in table["parts"]
            ]
            for found, table in (
                (specs.theirs, self.theirs),
                (specs.ours, self.ours),
            )
        ]
        same = len(before) == len(now) and kinds[0] == kinds[1]
        orders = {self.theirs["sharding"], self.ours["sharding"]}
        if tables.BY_ID in orders:  # Only cut into other shards.
            return same and len(orders) == 1 and before == now
        return same and all(b <= n for b, n in zip(before, now, strict=True))

    def values(
        self, read: Callable[[str], Any], current: Callable[[str], Any]
    ) -> dict[str, np.ndarray]:
        """Returns by key the rows of known ids as read, of others as now."""
        sources, targets = (
            np.concatenate(
                [
                    _stored_rows(table, np.arange(start, start + count))
                    for start, count in zip(
                        itertools.accumulate(table["sizes"], initial=0),
                        self.theirs["sizes"],
                        strict=False,
                    )
                ]
            )
            for table in (self.theirs, self.ours)
        )
        found: dict[str, np.ndarray] = {}
        for before, now in zip(
            self.theirs["parts"], self.ours["parts"], strict=True
        ):
            shards = [np.asarray(current(key)) for key in now]
            whole = np.concatenate(shards)
            whole[targets] = np.concatenate([read(key) for key in before])[
                sources
            ]
            ends = np.cumsum([len(shard) for shard in shards])[:-1]
            found |= dict(zip(now, np.split(whole, ends), strict=True))
        return found


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """Which of a backup's tensors a state begins with.

    `sources` has the backup's key for each of the state's; `step` is when the
    backup was made.
    """

    path: str
    sources: Mapping[str, str]
    moves: Sequence[Both]
    _: dataclasses.KW_ONLY
    step: int


def planned(chosen: store.Chosen, state: Any) -> WarmStart:
    """Returns what to begin with; ValueError if the backup does not fit."""
    theirs, ours = chosen.host.get("layout", {}), state.layout()
    if theirs.get("optimizer") != ours["optimizer"]:
        raise _refused(
            chosen,
            f"is of the optimizer {theirs.get('optimizer')}, and this training "
            f"has {ours['optimizer']}",
        )
    specs = Both(chosen.host["variables"], state.specs())
    sources: dict[str, str] = {}
    different: list[str] = []
    embeddings = Both(*(t.get("embeddings", []) for t in (theirs, ours)))
    moves = [
        table
        for table in embeddings.each(iter)
        if table.fits(specs) and not table.are_equal("sizes")
    ]
    moved = {key for m in moves for part in m.ours["parts"] for key in part}
    for kind, named in ours["carried"].items():
        carried = Both(theirs["carried"].get(kind, {}), named)
        for each in carried.each(dict.items):
            (own, name), other = each.ours or each.theirs, each.theirs
            if own in moved:
                continue
            if each.is_there and specs.ours[own] == specs.theirs[other[0]]:
                sources[own] = other[0]
            else:
                different.append(name)
    for table in Both(theirs["tables"], ours["tables"]).each(iter):
        if not table.fits(specs):
            named = table.ours or table.theirs
            different.append(named.get("name", "tables"))
            continue
        parts = table.each(operator.itemgetter("parts"))
        keys = [key for part in parts for key in part.each(iter)]
        if table.are_equal("sizes", "sharding") and all(
            key.is_there and specs.ours[key.ours] == specs.theirs[key.theirs]
            for key in keys
        ):
            sources |= {key.ours: key.theirs for key in keys}
        else:
            moves.append(table)
    if different:
        some = ", ".join(list(dict.fromkeys(different))[:5])
        raise _refused(chosen, f"differs from this training's in {some}")
    return WarmStart(
        chosen.version.path, sources, moves, step=chosen.point.step
    )


def _refused(chosen: store.Chosen, why: str) -> ValueError:
    return ValueError(
        "`warm_start` must have the same variables and optimizer, except that "
        "a table of embeddings may have more rows; received "
        f"{chosen.version.path}, which {why}. Train from new weights, without "
        "`warm_start`, and learn from the old model's predictions: "
        "teachers.FixedTeacher(old_model)."
    )
