"""Ids by a column beside ids by hashing: AUC and log loss on held-out rows.

A click model trains in one process on generated clicks, or on rows of Criteo's
log, with a table of a quarter as many rows as there are ids: that of a
`DynamicEmbedding`, in which the ids used least lose their rows, or one in which
all ids are hashed. One seed is one order of the rows, of which the last sixth
are held out, and one initialization.
"""

import os
import pathlib
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import measure
from tfdistill.system import programs

_NUM_NUMBERS, _NUM_FIELDS = 13, 26
# Of the generated clicks.
_ROWS, _IDS_PER_FIELD, _ZIPF, _FIELDS = 240_000, 40_000, 1.1, 6
_DIM, _HIDDEN = 8, (64, 32)
# Odd: spreads keys over rows (Knuth, The Art of Computer Programming 3, 6.4).
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_OURS = "by_id"
SIDES = (_OURS, "hashed", "hashed_whole")
_AUC = f"auc_of_{_OURS}_less_this"


def read(path: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Reads a log: float32 `[n, 13]`, int64 `[n, 26]`, float32 `[n, 1]`.

    Numbers as logarithms, 0 where they are missing, and ids as they are
    written, 0 where they are.
    """
    lines = pathlib.Path(path).read_text("utf-8").splitlines()
    rows = [line.split("\t") for line in lines]
    labels = np.array([[float(row[0])] for row in rows], "float32")
    numbers = np.array(
        [[float(v or 0) for v in row[1 : 1 + _NUM_NUMBERS]] for row in rows]
    )
    ids = np.array(
        [[int(v or "0", 16) for v in row[1 + _NUM_NUMBERS :]] for row in rows]
    )
    numbers = np.log1p(np.maximum(numbers, 0)).astype("float32")
    return numbers, ids.astype("int64"), labels


def generated() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Generates clicks: each id of six fields has an effect of its own.

    Returns:
        As `read`; the ids are of 60 bits, and follow a Zipf law.
    """
    rng = np.random.default_rng(0)
    rank = np.arange(1, _IDS_PER_FIELD + 1)
    share = rank**-_ZIPF / np.sum(rank**-_ZIPF)
    drawn = rng.choice(_IDS_PER_FIELD, (_ROWS, _FIELDS), p=share)
    names = rng.integers(0, 2**58, (_FIELDS, _IDS_PER_FIELD))
    effects = rng.normal(0, 0.7, (_FIELDS, _IDS_PER_FIELD))
    fields = np.arange(_FIELDS)
    numbers = rng.normal(size=(_ROWS, 3)).astype("float32")
    logits = effects[fields, drawn].sum(1) + 0.3 * numbers[:, 0] - 1.5
    clicks = rng.random(_ROWS) < 1 / (1 + np.exp(-logits))
    return numbers, names[fields, drawn], clicks[:, None].astype("float32")


def hashed(ids: np.ndarray, num_rows: int) -> np.ndarray:
    """Returns rows of one table for the ids of all fields, int64 `[n, 26]`."""
    num_fields = ids.shape[1]
    keys = (ids * num_fields + np.arange(num_fields)).astype("uint64")
    return ((keys * _FACTOR >> np.uint64(20)) % num_rows).astype("int64")


def train(
    side: str, data: Sequence[np.ndarray], num_rows: int, seed: int, epochs: int
) -> dict[str, float]:
    """Trains one side.

    Args:
        side: One of `SIDES`.
        data: What `read` or `generated` returned.
        num_rows: Distinct ids of all fields; tables have a quarter as many
            rows, but that of the side `"hashed_whole"`.
        seed: Of the split, the order and the weights.
        epochs: How often the rows are read.

    Returns:
        AUC and log loss in nats on held-out rows, and rows of the table.
    """
    import keras

    import tfdistill

    keras.utils.set_random_seed(seed)
    order = np.random.default_rng(seed).permutation(len(data[0]))
    numbers, ids, labels = (each[order] for each in data)
    part = num_rows if side == "hashed_whole" else num_rows // 4
    layers = tfdistill.layers
    table: Any
    if side == _OURS:
        table = layers.DynamicEmbedding(
            part,
            _DIM,
            num_fields=ids.shape[1],
            evict="count",
        )
    else:
        ids = hashed(ids, part)
        table = layers.ShardedEmbedding(part, _DIM)
    x = keras.Input(numbers.shape[1:], name="x")
    given = keras.Input(ids.shape[1:], dtype="int64", name="ids")
    hidden = keras.layers.Concatenate()(
        [x, keras.layers.Flatten()(table(given))]
    )
    for width in _HIDDEN:
        hidden = keras.layers.Dense(width, activation="relu")(hidden)
    model = tfdistill.DistributedModel(
        keras.Model({"x": x, "ids": given}, keras.layers.Dense(1)(hidden))
    )
    model.compile(
        keras.optimizers.Adagrad(0.01, initial_accumulator_value=1e-6),
        keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.AUC(from_logits=True, num_thresholds=2000)],
        jit_compile=False,
    )
    count = len(ids) * 5 // 6
    features = {"x": numbers, "ids": ids}
    known, held = (
        ({k: v[part] for k, v in features.items()}, labels[part])
        for part in (slice(None, count), slice(count, None))
    )
    model.fit(*known, batch_size=128, epochs=epochs, verbose=0)
    loss, auc = model.evaluate(*held, batch_size=1000, verbose=0)
    return {"auc": auc, "log_loss": loss, "rows": table.layout.num_rows}


def compare(
    found: Mapping[str, Sequence[Mapping[str, float]]],
) -> dict[str, Any]:
    """Compares the sides.

    Args:
        found: By side what `train` returned for each seed.

    Returns:
        By side the means; and what ours has more than the side, with the 95%
        interval over seeds.
    """
    return {
        side: {
            figure: measure.over_seeds([run[figure] for run in runs])["mean"]
            for figure in runs[0]
        }
        | {
            f"{figure}_of_{_OURS}_less_this": _less(found[_OURS], runs, figure)
            for figure in ("auc", "log_loss")
            if side != _OURS
        }
        for side, runs in found.items()
    }


def _less(ours: Any, others: Any, figure: str) -> list[float]:
    """Returns the mean of the differences, and the ends of its interval."""
    less = measure.difference_over_seeds(ours, others, figure)
    return [less["mean"], *less["interval"]]


def run(options: programs.Options, record: dict[str, Any]) -> None:
    """Trains all sides with each seed and fills the record.

    Args:
        options: The options of the command line.
        record: What will be printed.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    data = read(options.path) if options.path else generated()
    num_ids = sum(len(np.unique(field)) for field in data[1].T)
    record.update(benchmark="ids", config=dict(vars(options)), num_ids=num_ids)
    found: dict[str, list[Any]] = {side: [] for side in SIDES}
    for seed in range(options.seeds):
        for side, runs in found.items():
            runs.append(train(side, data, num_ids, seed, options.epochs))
            measure.log(f"seed {seed}: {side} {runs[-1]}")
    record["sides"] = compare(found)
    record["met"] = record["sides"]["hashed"][_AUC][0] >= 0
    record["machine"] = measure.machine()


def _add_options(options: programs.Flags) -> None:
    options.add("path", "rows of Criteo's log; by default clicks are made", "")
    # One seed has no interval.
    options.add("seeds", "trainings of each side", 6, quick=2)
    options.add("epochs", "how often the rows are read", 1)


PROGRAM = measure.program("ids", __doc__, define=_add_options, run=run)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
