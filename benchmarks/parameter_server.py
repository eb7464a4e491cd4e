"""Examples per second of `fit` on parameter servers: ours beside tf_keras.

A click model with one table for 26 fields trains on two workers and two
parameter servers. Every side has a fresh cluster of real processes in every
turn, and the sides alternate. First, one turn of each way to train with
tf_keras selects the best ones, which enter the rounds. Instead, `--rows`
measures how step time grows with a table, and `--bytes` measures traffic.
"""

import functools
import os
import statistics
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from benchmarks import click_training
from benchmarks import measure
from benchmarks import parameter_server_task
from benchmarks import parameter_server_turn
from benchmarks import table_growth
from tfdistill.system import programs

_OURS = "tfdistill_x10"
# By setting: what ours is at least to be times the best of the others.
_TARGETS = {
    "mlp": {"tf_keras": 1.3, "one_process": 0.8, "keras": 4.0},
    "wide": {"tf_keras": 2.0},
    "tiny": {"tf_keras": 1.3},
}
_OUR_SIDES = ("tfdistill_x10", "tfdistill_x1")
_OTHERS = ("one_process_x10", "bare_step_x10", "keras_x1")


def compare(
    rates: Mapping[str, Sequence[float]], targets: Mapping[str, float]
) -> dict[str, Any]:
    """Compares our `fit` with the best side of each rival.

    Args:
        rates: Examples per second by side, in the order of the rounds.
        targets: By rival, the beginning of its sides' names: the least ratio.

    Returns:
        By rival a judgement, with the side that was its best by the median.
    """
    found = {}
    for rival, target in targets.items():
        medians = {
            name: statistics.median(values)
            for name, values in rates.items()
            if name.startswith(f"{rival}_")
        }
        best = max(medians, key=lambda name: medians[name])
        ratios = measure.ratio_of(rates[_OURS], rates[best], best=max)
        found[rival] = {
            **measure.judge(ratios["of_medians"], at_least=target),
            "best": best,
            "ratios": ratios,
        }
    return found


def kept(trials: Mapping[str, float], count: int) -> list[str]:
    """Chooses which of tf_keras' sides enter the rounds.

    Args:
        trials: Examples per second in one turn, by side.
        count: How many to keep.

    Returns:
        The best of them, and the very best with TensorFlow's own threads.
    """
    ranked = sorted(trials, key=lambda name: trials[name], reverse=True)
    return [*ranked[:count], ranked[0] + parameter_server_turn.TF_THREADS]


def _measure(setting: str, options: programs.Options) -> dict[str, Any]:
    def turn(name: str) -> float:
        return parameter_server_turn.rate(name, options, setting=setting)

    trials = {}
    candidates = [
        f"{name}_x{steps}"
        for name in options.tf_keras
        for steps in options.steps_per_execution
    ]
    for name in candidates:
        trials[name] = turn(name) if len(candidates) > 1 else 0.0
        measure.log(f"{setting} trial: {name} {trials[name]:.0f}/s")
    targets = _TARGETS[setting]
    others = _OTHERS if "one_process" in targets else ()
    sides = [*_OUR_SIDES, *kept(trials, options.keep), *others]
    rates = measure.interleave(
        {name: functools.partial(turn, name) for name in sides},
        rounds=options.rounds,
        warm_up_rounds=0,
    )
    against = compare(rates, targets)
    if others:
        bare = measure.ratio_of(rates[_OURS], rates["bare_step_x10"], best=max)
        against["one_process"]["ratios_to_bare_step"] = bare
    return {
        "against": against,
        "examples_per_second": {
            name: measure.summary(values) for name, values in rates.items()
        },
        "trials_of_tf_keras": {k: round(v, 1) for k, v in trials.items()},
        "bound": table_growth.bound(setting),
    }


def run(options: programs.Options, record: dict[str, Any]) -> None:
    """Measures what was asked for and fills the record.

    Args:
        options: The options of the command line.
        record: What will be printed.
    """
    record.update(
        benchmark="parameter_server",
        config=dict(vars(options)),
        load_average_at_start=round(os.getloadavg()[0], 2),
    )
    if options.rows or options.bytes:
        if options.rows:
            record["rows"] = table_growth.rows(options)
        if options.bytes:
            record["bytes"] = table_growth.traffic(options)
        judged = [record[k] for k in ("rows",) if k in record]
    else:
        settings = {name: _measure(name, options) for name in options.settings}
        record["settings"] = settings
        judged = [
            one
            for found in settings.values()
            for one in found["against"].values()
        ]
    if judged:
        record["met"] = all(one["met"] for one in judged)
    record["machine"] = measure.machine()


def _add_options(options: programs.Flags) -> None:
    for name, default, values, text, quick in (
        ("settings", ["mlp", "wide"], _TARGETS, "models to measure", ["mlp"]),
        (
            "tf_keras",
            list(parameter_server_task.TF_KERAS),
            parameter_server_task.TF_KERAS,
            "its ways to train: Adagrad, partitioner",
            # The best of the six in most runs.
            ["tf_keras_new_whole"],
        ),
    ):
        options.add(name, text, default, enum_values=list(values), quick=quick)
    options.add(
        "steps_per_execution", "of tf_keras' sides", [1, 10], quick=[10]
    )
    options.add("spreads", "powers of ten: sizes of tables", [1, 10, 100, 1000])
    for name, number, text, fewer in (
        ("keep", 2, "sides of tf_keras in the rounds", 1),
        ("steps", 200, "steps an epoch", 100),
        ("epochs", 3, "measured epochs a turn", 1),
        ("rounds", 5, "turns of each side", 1),
    ):
        options.add(name, text, number, quick=fewer)
    for name, text in (
        ("rows", "measure growing tables instead"),
        ("bytes", "measure traffic instead"),
    ):
        options.add(name, text, False)
    options.add("turn_timeout_secs", "limit of a turn", 300.0)


def _check(options: programs.Options) -> None:
    most = max([10, *options.steps_per_execution])
    if options.steps < most:
        raise programs.UsageError(
            f"--steps must be at least {most}, the steps of an execution; "
            f"received {options.steps}"
        )
    unknown = [
        spread
        for spread in options.spreads
        if f"rows_{spread}" not in click_training.SETTINGS
    ]
    if unknown:
        raise programs.UsageError(
            f"--spreads must be powers of ten; received {unknown}"
        )


def _run(options: programs.Options) -> int:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    _check(options)
    with measure.one_json_line() as record:
        run(options, record)
    return 0


PROGRAM = programs.Program(
    name="python -m benchmarks.parameter_server",
    about=__doc__,
    define=_add_options,
    run=_run,
)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
