"""Criteo's rows in the order of the file, in parts: the spans of a model line.

The rows have no date. Parts of a file that is in the order of time differ as
days do: of the 18,000 rows of the sample, 21.6% and 25.1% of the two halves are
clicks.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

import tfdistill
from models import click_log
from models import criteo
from models import files as data_files
from models.criteo import batches
from models.criteo import converted
from models.criteo import rows

Rows = tuple[dict[str, np.ndarray], np.ndarray]


def workload(
    spans: Sequence[str] = (),
    continues: bool = False,
    num_days: int = 6,
    path: Any = None,
    cache_dir: Any = None,
    learning_rate: float = 8e-3,
    fresh_learning_rate: float = 4e-3,
    batch_size: int = 128,
    epochs: int = 2,
    fresh_epochs: int = 6,
    num_steps: int = 0,
    embedding_dim: int = 16,
    hidden_units: Sequence[int] = (256, 128, 64),
    field_sizes: int = 2000,
    churn_budget: float = 0.0,
    teacher_weight: float = 1.0,
    every_steps: int = 20,
    refresh_every_steps: int = 5,
) -> tfdistill.Workload:
    """Returns a retrain on parts of a file of Criteo's clicks, for a line.

    `spans` are day_0 to day_5; a sixth of the last one's rows are held out.
    `num_steps` of 0 are `epochs` passes over them if training continues from a
    promoted version, and `fresh_epochs` from new weights, with
    `fresh_learning_rate`: the best of a few for the log loss.
    """
    binary = converted.open_or_convert(
        data_files.data_dir() / "criteo" if path is None else path,
        options=converted.Options(field_sizes=field_sizes),
        cache_dir=cache_dir,
    )
    days = [click_log.day_of(name, num_days) for name in spans or ["day_0"]]
    parts = [_rows(binary, "train", day, num_days) for day in days]
    train = (
        {
            key: np.concatenate([x[key] for x, _ in parts])
            for key in parts[0][0]
        },
        np.concatenate([y for _, y in parts]),
    )
    passes = epochs if continues else fresh_epochs
    steps = num_steps or max(1, passes * len(train[1]) // batch_size)
    rate = keras.optimizers.schedules.CosineDecay(
        learning_rate if continues else fresh_learning_rate, steps
    )
    return dataclasses.replace(
        criteo.workload(
            batch_size=batch_size,
            num_steps=steps,
            evaluate_every_steps=steps,
            steps_per_execution=1,
            embedding_dim=embedding_dim,
            hidden_units=hidden_units,
            field_sizes=field_sizes,
            every_steps=min(every_steps, steps),
            refresh_every_steps=refresh_every_steps,
        ),
        data=(train, _rows(binary, "validation", days[-1], num_days)),
        schema=None,
        optimizer=lambda: keras.optimizers.Adagrad(
            rate, initial_accumulator_value=1e-6
        ),
        distillation_weight=teacher_weight,
        line=tfdistill.contrib.line.LineSettings(churn_budget=churn_budget),
    )


def _rows(
    binary: converted.Binary, split: str, day: int, num_days: int
) -> Rows:
    """Returns a day's part of a split, which is in the order of the file."""
    words = np.concatenate(
        [np.fromfile(path, "<i4") for path in binary.parts(split)]
    ).reshape(-1, rows.NUM_COLUMNS)
    own = np.array_split(words, num_days)[day]
    floats = own[:, : rows.FIRST_CATEGORY].view("<f4")
    integers = np.nan_to_num(floats[:, 1:], nan=batches.MISSING)
    return (
        {"integers": integers, "categories": own[:, rows.FIRST_CATEGORY :]},
        floats[:, :1].copy(),
    )
