"""What a bad peer costs a student, and what an honest one counts.

Two groups train a recipe by turns (`two_groups`). Group 1 is of one kind:
honest, or trained on wrong labels, or dead. The record has, by kind and seed,
the held-out log loss of group 0 beside its loss alone, and the share of the
steps after the burn-in in which it had a teacher. With validation data it also
says whether the rule without them would have decided otherwise: a training in
which no version was refused and no teacher doubted is the same without them.
"""

import dataclasses
import statistics
from typing import Any

import keras
import tensorflow as tf

from benchmarks import measure
from benchmarks import two_groups
from launch import recipes
from tfdistill.system import programs

_KINDS = (
    *("honest", "base_rates", "rotated", "half_rotated", "learning_rate_0"),
    *("dead_25", "dead_137", "nan", "offset"),
)
_RATES = {"learning_rate_0": 0.0, "nan": 1e30}
# The share of steps that an honest peer teaches; and in nats, what others cost.
_LEAST_TAUGHT, _MOST_WORSE = 0.75, 0.01


def _change(kind: str) -> two_groups.Change:
    """What a peer of a kind does."""
    is_rotated = {"rotated": 1.0, "half_rotated": 0.5}.get(kind, 0.0)

    def changed(data: tf.data.Dataset, student: keras.Model) -> Any:
        num_classes = int(student.output_shape[-1])

        def change(x: Any, y: Any) -> Any:
            if kind == "base_rates":
                return x, tf.random.shuffle(y)
            if kind == "offset":
                return x, y, 1 + (2.71828**0.5 - 1) * tf.cast(y, tf.float32)
            one = tf.ones([], y.dtype)
            rotated = (y + one) % max(num_classes, 2)
            return x, tf.where(
                tf.random.uniform(tf.shape(y)) < is_rotated, rotated, y
            )

        return data.map(change)

    if kind == "honest" or kind in _RATES:
        return two_groups.Change(rate=_RATES.get(kind))
    if kind.startswith("dead"):
        return two_groups.Change(num_steps=int(kind.split("_")[1]))
    return two_groups.Change(data=changed)


def _one(workload: Any, kind: str, *, validated: bool) -> dict[str, Any]:
    """Trains both groups; returns what became of group 0."""
    alone = kind == "alone"
    found = two_groups.train(
        workload,
        other=None if alone else _change(kind),
        teachers=(lambda _: None) if alone else two_groups.of_peers,
        groups=(0,) if alone else (0, 1),
        validated=validated,
    )[0]
    return {
        "log_loss": found.loss,
        "taught": found.taught,
        "same_without": not found.is_doubted,
    }


def run(options: programs.Options, record: dict[str, Any]) -> None:
    """Trains all kinds with all seeds, and fills the record."""
    found: dict[str, list[dict[str, Any]]] = {}
    for kind in ("alone", *options.kinds):
        for seed in range(1, options.seeds + 1):
            workload = recipes.get(options.recipe).workload()
            changes: dict[str, Any] = {"seed": seed}
            if options.every_steps is not None:
                changes["every_steps"] = options.every_steps
                changes["refresh_every_steps"] = options.every_steps
            workload = dataclasses.replace(workload, **changes)
            result = _one(workload, kind, validated=not options.unvalidated)
            found.setdefault(kind, []).append(result)
            measure.log(f"{kind}, seed {seed}: {found[kind][-1]}")
    judged = {
        kind: _judged(kind, found)
        for kind in options.kinds
        # It is warned of, and no more.
        if kind != "half_rotated" or not options.unvalidated
    }
    record.update(
        benchmark="bad_peers",
        config=vars(options),
        kinds=found,
        judged=judged,
        met=all(each["met"] for each in judged.values()),
    )


def _judged(kind: str, found: dict[str, Any]) -> dict[str, Any]:
    """An honest peer teaches; any other one costs nothing beside no teacher."""
    mean = {
        key: statistics.fmean(each[key] for each in found[kind])
        for key in ("log_loss", "taught")
    }
    if kind == "honest":
        return measure.judge(mean["taught"], at_least=_LEAST_TAUGHT)
    alone = statistics.fmean(each["log_loss"] for each in found["alone"])
    cost = max(0.0, mean["log_loss"] - alone)
    return measure.judge(cost, at_most=_MOST_WORSE)


def _add_options(options: programs.Program) -> None:
    options.add("recipe", "a recipe, or file.py", "digits")
    # The last one is of clicks.
    options.add(
        "kinds", "of group 1", list(_KINDS[:-1]), enum_values=list(_KINDS)
    )
    options.add("seeds", "trainings of each kind", 3, quick=1)
    options.add(
        "every_steps", "steps between versions, and refreshes", None, kind=int
    )
    options.add("unvalidated", "`fit` gets no validation data", False)


PROGRAM = measure.program("bad_peers", __doc__, define=_add_options, run=run)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
