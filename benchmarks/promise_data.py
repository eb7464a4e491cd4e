"""The data sets of `promise`: nobody has chosen settings by them.

Each is trained by the rule of docs/workload.md: Adam, whose rate falls to zero
by a cosine; a step is 64 rows. Steps are as many as one model alone needs until
its held-out loss falls no more.
"""

import collections
import dataclasses
import lzma
import re
import zlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import tfdistill
from launch import recipes
from models import files

_BATCH, _TABLE, _WORDS, _LENGTH = 64, 100_000, 5_000, 120
_REVIEWS, _CLICKS = 6_000, 9_000


def _workload(
    x: Any, y: Any, build: Callable[[], Any], loss: Any, **options: Any
) -> tfdistill.Workload:
    """A fifth of the rows, drawn once, is held out."""
    rows = np.random.default_rng(5).permutation(len(x))
    held_out, train = np.split(rows, [len(x) // 5])
    num_steps = options["num_steps"]
    rate = options.pop("rate", 1e-3)
    return tfdistill.Workload(
        model=build,
        data=((x[train], y[train]), (x[held_out], y[held_out])),
        batch_size=_BATCH,
        mode="shared",
        optimizer=lambda: keras.optimizers.Adam(
            keras.optimizers.schedules.CosineDecay(rate, num_steps)
        ),
        loss=loss,
        **options,
    )


def _classes() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _table(x: np.ndarray, units: int, width: int = 64) -> Callable[[], Any]:
    return lambda: keras.Sequential(
        [
            keras.Input(x.shape[1:]),
            keras.layers.Dense(width, activation="relu"),
            keras.layers.Dense(units),
        ]
    )


def _of_sklearn(name: str, num_steps: int, rate: float) -> Any:
    """Standardized columns; a regression's target, too."""
    from sklearn import datasets

    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    x = ((x - x.mean(0)) / np.maximum(x.std(0), 1e-6)).astype("float32")
    if name == "diabetes":
        y = ((y - y.mean()) / y.std()).astype("float32")[:, None]
        return _workload(
            x,
            y,
            _table(x, 1),
            keras.losses.MeanSquaredError(),
            distillation_loss=tfdistill.losses.LogitsMeanSquaredError(
                from_logits=True
            ),
            num_steps=num_steps,
            rate=rate,
        )
    classes = int(y.max()) + 1
    return _workload(
        x, y, _table(x, classes), _classes(), num_steps=num_steps, rate=rate
    )


def _reviews() -> Any:
    """IMDb's, as bags of the commonest words."""
    path = files.data_dir() / "imdb" / "imdb_train.tsv.xz"
    with lzma.open(path, "rt", errors="replace") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    drawn = np.random.default_rng(5).permutation(len(rows))[:_REVIEWS]
    rows = [rows[row] for row in drawn]
    column = next(
        i for i in range(len(rows[0])) if len({row[i] for row in rows}) == 2
    )
    y = np.unique([row[column] for row in rows], return_inverse=True)[1]
    texts = [re.findall(r"[a-z']+", row[-1].lower()) for row in rows]
    counts = collections.Counter(word for text in texts for word in text)
    known = {w: i + 2 for i, (w, _) in enumerate(counts.most_common(_WORDS))}
    x = np.zeros([len(rows), _LENGTH], "int32")
    for row, text in zip(x, texts, strict=True):
        words = [known.get(word, 1) for word in text[:_LENGTH]]
        row[: len(words)] = words

    def build() -> Any:
        return keras.Sequential(
            [
                keras.Input([_LENGTH], dtype="int32"),
                keras.layers.Embedding(_WORDS + 2, 32),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(32, activation="relu"),
                keras.layers.Dense(2),
            ]
        )

    return _workload(x, y, build, _classes(), num_steps=300, rate=3e-3)


def _criteo() -> Any:
    """Clicks of Criteo: all columns as ids of one table, as in the docs."""
    (path, *_) = sorted((files.data_dir() / "criteo").glob("*.tsv"))
    lines = path.read_text().splitlines()
    drawn = np.random.default_rng(5).permutation(len(lines))[:_CLICKS]
    rows = [lines[row].split("\t") for row in drawn]
    y = np.array([[float(row[0])] for row in rows], "float32")
    x = [
        [zlib.crc32(f"{i}={v}".encode()) % _TABLE for i, v in enumerate(r[1:])]
        for r in rows
    ]
    ids = np.array(x, "int32")

    def build() -> Any:
        inputs = keras.Input([ids.shape[1]], dtype="int32")
        table = keras.layers.Embedding(_TABLE, 8)
        hidden = keras.layers.Flatten()(table(inputs))
        hidden = keras.layers.Dense(64, activation="relu")(hidden)
        return keras.Model(inputs, keras.layers.Dense(1)(hidden))

    return _workload(
        ids,
        y,
        build,
        keras.losses.BinaryCrossentropy(from_logits=True),
        distillation_loss=tfdistill.losses.BinarySoftTargetCrossEntropy(
            from_logits=True
        ),
        num_steps=250,
    )


def _digits() -> Any:
    from sklearn import datasets

    x, y = datasets.load_digits(return_X_y=True)
    x = (x / 16).astype("float32")
    return _workload(x, y, _table(x, 10), _classes(), num_steps=400, rate=2e-3)


DATA: dict[str, Callable[[], Any]] = {
    "digits": _digits,
    "cancer": lambda: _of_sklearn("breast_cancer", 200, 1e-3),
    "wine": lambda: _of_sklearn("wine", 150, 1e-3),
    "diabetes": lambda: _of_sklearn("diabetes", 250, 1e-3),
    "imdb_bow": _reviews,
    "criteo_rows": _criteo,
}


def get(name: str) -> Any:
    """Returns the workload of a data set or of a recipe; groups share data."""
    if name in DATA:
        return DATA[name]()
    return dataclasses.replace(recipes.get(name).workload(), mode="shared")
