"""What a new training takes over from the backup of an earlier one.

Weights and the optimizer's slots, in the order of the variables. Rows of a
table follow their ids: another number of rows lies in another order.
"""

import dataclasses
import itertools
from collections.abc import Callable
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
class Move:
    """A table whose rows lie elsewhere than in the backup."""

    theirs: Mapping[str, Any]
    ours: Mapping[str, Any]

    def fits(self, specs: Sequence[Mapping[str, Any]]) -> bool:
        """Whether each field of it has at least as many ids as before.

        And rows and slots of the same kind. `specs` are theirs and ours.
        """
        before, now = self.theirs["sizes"], self.ours["sizes"]
        kinds = [
            [
                (found[keys[0]]["shape"][1:], found[keys[0]]["dtype"])
                for keys in table["parts"]
            ]
            for found, table in zip(
                specs, (self.theirs, self.ours), strict=True
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
    moves: Sequence[Move]
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
    specs = chosen.host["variables"], state.specs()
    sources, moves, different = {}, [], []
    moved: set[str] = set()
    for before, now in zip(
        *(t.get("embeddings", []) for t in (theirs, ours)), strict=False
    ):
        move = Move(before, now)
        if before["sizes"] != now["sizes"] and move.fits(specs):
            moves.append(move)
            moved |= {key for part in now["parts"] for key in part}
    for kind in ours["carried"]:
        for before, now in itertools.zip_longest(
            *(list(t["carried"].get(kind, {}).items()) for t in (theirs, ours))
        ):
            if now and now[0] in moved:
                continue
            if before and now and specs[0][before[0]] == specs[1][now[0]]:
                sources[now[0]] = before[0]
            else:
                different.append((now or before)[1])
    for before, now in itertools.zip_longest(
        *(t["tables"] for t in (theirs, ours))
    ):
        if not (before and now and Move(before, now).fits(specs)):
            different.append((now or before).get("name", "tables"))
            continue
        pairs = [
            (own, other)
            for parts in zip(now["parts"], before["parts"], strict=True)
            for own, other in itertools.zip_longest(*parts)
        ]
        if all(before[k] == now[k] for k in ("sizes", "sharding")) and all(
            None not in (own, other) and specs[0][other] == specs[1][own]
            for own, other in pairs
        ):
            sources |= dict(pairs)
        else:
            moves.append(Move(before, now))
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
