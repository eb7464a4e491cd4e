"""Tables on parameter servers: ids by a column, many tables, and large ones.

The click model of `parameter_server` trains on two workers and two servers, ten
steps an execution. A `DynamicEmbedding` is beside the table whose ids are
hashed; and a table for each of the 26 fields, by `FeatureEmbedding`, which
stacks them, beside as many layers that are looked up one by one. A smaller
model reads the same rows of a table of 1e5 rows and of one of 1e8, which takes
3.2 GB of memory.
"""

import functools
import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks import click_training
from benchmarks import measure
from benchmarks import parameter_server
from tfdistill.system import programs

_STEPS = "x10"
_HASHED, _BY_ID, _STACKED, _APART = (
    f"tfdistill_{name}{_STEPS}"
    for name in (
        "",
        f"{click_training.BY_ID}_",
        f"{click_training.FEATURES}_",
        f"{click_training.APART}_",
    )
)
# What ours is to be times the other: examples per second, the first step.
_LEAST_RATES = {(_BY_ID, _HASHED): 1 / 1.1, (_STACKED, _APART): 1.0}
_MOST_FIRST = {(_STACKED, _APART): 0.25}
# Settings: a table, and a larger one; and what a step may cost by that. Epochs
# have more steps: at the end of each all rows are looked at.
_SMALL, _LARGE, _MOST_GROWTH = "rows_1", "rows_1000", 1.1
_MORE_STEPS = 10


def compare(found: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Compares the sides of each pair.

    Args:
        found: By side what `click_training.fit` returned in each round.

    Returns:
        By side the medians, and the judgements of the ratios.
    """
    rates = {
        side: [statistics.median(turn["rates"]) for turn in turns]
        for side, turns in found.items()
    }
    first = {
        side: [turn["first_step_secs"] for turn in turns]
        for side, turns in found.items()
    }
    return {
        "examples_per_second": {
            k: measure.summary(v) for k, v in rates.items()
        },
        "first_step_secs": {k: measure.summary(v) for k, v in first.items()},
        "rates": {
            f"{ours} / {other}": measure.judge(
                measure.ratio_of(rates[ours], rates[other])["of_medians"],
                at_least=least,
            )
            for (ours, other), least in _LEAST_RATES.items()
        },
        "first_steps": {
            f"{ours} / {other}": measure.judge(
                measure.ratio_of(first[ours], first[other])["of_medians"],
                at_most=most,
            )
            for (ours, other), most in _MOST_FIRST.items()
        },
    }


def growth(options: programs.Options) -> dict[str, Any]:
    """Compares steps with a table of 1e5 rows and with one of 1e8.

    Args:
        options: The options of the command line.

    Returns:
        A judgement, and by setting the milliseconds of a step.
    """
    longer = programs.Options(
        **{**vars(options), "steps": options.steps * _MORE_STEPS}
    )

    def millis(name: str) -> float:
        rate = parameter_server.rate(_HASHED, longer, setting=name)
        return click_training.SETTINGS[name].batch_size / rate * 1e3

    found = measure.interleave(
        {n: functools.partial(millis, n) for n in (_SMALL, _LARGE)},
        rounds=options.growth_rounds,
        warm_up_rounds=0,
    )
    ratios = measure.ratio_of(found[_LARGE], found[_SMALL])
    return {
        **measure.judge(ratios["of_medians"], at_most=_MOST_GROWTH),
        "ratios": ratios,
        "step_millis": {k: measure.summary(v) for k, v in found.items()},
    }


def run(options: programs.Options, record: dict[str, Any]) -> None:
    """Measures all sides in turn and fills the record.

    Args:
        options: The options of the command line.
        record: What will be printed.
    """
    record.update(benchmark="tables", config=dict(vars(options)))
    sides = (_HASHED, _BY_ID, _STACKED, _APART)
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for number in range(options.rounds):
        for side in sides if number % 2 else sides[::-1]:
            turn = parameter_server.turn(side, options, setting="mlp")
            measure.log(f"round {number + 1}: {side} {turn}")
            found[side].append(turn)
    record.update(compare(found))
    judged = [*record["rates"].values(), *record["first_steps"].values()]
    if options.growth_rounds:
        record["growth"] = growth(options)
        judged.append(record["growth"])
    record["met"] = all(one["met"] for one in judged)
    record["machine"] = measure.machine()


def _add_options(options: programs.Flags) -> None:
    parameter_server.add_turns(options)
    options.add(
        "growth_rounds",
        "turns of the small and of the large table; 0 leaves them out",
        5,
        quick=0,
    )


PROGRAM = measure.program("tables", __doc__, define=_add_options, run=run)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
