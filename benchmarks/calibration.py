"""Whether a biased teacher spoils calibration, and whether a head prevents it.

On generated clicks, whose true probabilities are known, a student learns beside
a teacher that is off by a constant on the logit: alone, directly, or by an
auxiliary head. Its calibration is how far the mean of its predictions for rows
held out is off the mean of their true probabilities, as a share of that. By
side the record has that of each seed, and the mean with a 95% interval.
"""

import statistics
from typing import Any

import keras
import numpy as np
from scipy import stats

import tfdistill
from benchmarks import measure
from models import click_log
from models import clicks
from tfdistill.system import programs

_BATCH_SIZE = 512
# With a head, and at least without one.
_MOST_OFF, _LEAST_OFF = 0.01, 0.05
_HEADS: dict[str, dict[str, str]] = {
    "alone": {},
    "direct": {},
    "auxiliary": {"click_soft": "click"},
}


def _fit(model: Any, rows: click_log.Log, epochs: int, **compiled: Any) -> None:
    # To 0, so that no last step moves the mean.
    rate = keras.optimizers.schedules.CosineDecay(
        1e-3, epochs * len(rows.labels) // _BATCH_SIZE
    )
    model.compile(
        keras.optimizers.Adam(rate),
        {"click": keras.losses.BinaryCrossentropy(from_logits=True)},
        **compiled,
    )
    labels = {"click": rows.labels}
    model.fit(
        rows.inputs, labels, batch_size=_BATCH_SIZE, epochs=epochs, verbose=0
    )


def _teacher(rows: click_log.Log, epochs: int, bias: float) -> keras.Model:
    """Returns a model of the clicks, its logits off by a constant."""
    made = clicks.build_model(outputs=["click"])
    _fit(tfdistill.DistributedModel(made), rows, epochs)
    offset = made.get_layer("click_logit").bias
    offset.assign_add([bias])
    return made


def _off(model: Any, rows: click_log.Log) -> float:
    """Returns the calibration on some rows; 0 is right."""
    logits = model.predict(rows.inputs, batch_size=4096, verbose=0)["click"]
    predicted = 1 / (1 + np.exp(-np.asarray(logits, np.float64)))
    return float(predicted.mean() / rows.probabilities.mean() - 1)


def _one(side: str, seed: int, options: programs.Options) -> float:
    """Trains a student of one side; returns its calibration."""
    keras.utils.set_random_seed(seed)
    log = click_log.generate(seed, options.rows_per_day)
    is_held_out = np.arange(len(log.labels)) % 5 == 0
    train = log.where(~is_held_out)
    heads, teachers = _HEADS[side], None
    if side != "alone":
        teacher = _teacher(train, options.epochs, options.bias)
        teachers = tfdistill.teachers.FixedTeacher(teacher)
    model = tfdistill.CodistillModel(
        clicks.build_model(outputs=["click", *heads]),
        teachers=teachers,
        auxiliary_heads=heads,
    )
    soft = tfdistill.losses.BinarySoftTargetCrossEntropy(from_logits=True)
    _fit(model, train, options.epochs, distillation_loss=soft)
    return _off(model, log.where(is_held_out))


def _mean(values: list[float]) -> dict[str, float]:
    """Returns the mean, and half of its 95% interval by Student's t."""
    half = stats.sem(values) * stats.t.ppf(0.975, len(values) - 1)
    return {"mean": statistics.fmean(values), "plus_minus": float(half)}


def run(options: programs.Options, record: dict[str, Any]) -> None:
    """Trains all sides with all seeds, and fills the record."""
    found: dict[str, list[float]] = {side: [] for side in _HEADS}
    for seed in range(1, options.seeds + 1):
        for side, values in found.items():
            values.append(_one(side, seed, options))
            measure.log(f"seed {seed}, {side}: {values[-1]:+.4f}")
    means = {side: _mean(values) for side, values in found.items()}
    # By the ends of the intervals: the one farthest from 0, and the nearest.
    with_head, direct = means["auxiliary"], means["direct"]
    most = abs(with_head["mean"]) + with_head["plus_minus"]
    least = abs(direct["mean"]) - direct["plus_minus"]
    judged = {
        "auxiliary": measure.judge(most, at_most=_MOST_OFF),
        "direct": measure.judge(least, at_least=_LEAST_OFF),
    }
    record.update(
        benchmark="calibration",
        machine=measure.machine(),
        config=vars(options),
        sides=found,
        means=means,
        judged=judged,
        met=all(each["met"] for each in judged.values()),
    )


def _add_options(options: programs.Flags) -> None:
    options.add("bias", "of the teacher, on the logit", 0.5)
    options.add("epochs", "passes over the rows", 3)
    options.add("rows_per_day", "of each of the eight days", 40_000, quick=8000)
    options.add("seeds", "logs, each with its trainings, >= 2", 6, quick=2)


PROGRAM = measure.program("calibration", __doc__, define=_add_options, run=run)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
