"""Examples per second of `fit` on parameter servers: ours beside tf_keras.

A click model with one table for 26 fields trains on two workers and two
parameter servers. Every side has a fresh cluster of real processes in every
turn, and the sides alternate. First, one turn of each way to train with
tf_keras selects the best ones, which enter the rounds.
"""

import fnmatch
import functools
import json
import os
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from benchmarks import click_training
from benchmarks import measure
from benchmarks import parameter_server_task
from tfdistill.launcher import local_cluster
from tfdistill.launcher import local_run
from tfdistill.system import programs

_OURS, _ONE, _AUTO = (f"tfdistill_x{steps}" for steps in ("10", "1", "auto"))
# "auto" is what a `fit` without a number of steps does, and one what that of
# tf_keras does.
_AT_ONE = "tf_keras_*_x1"
# By setting: our side, those of which it is compared with the best, and what it
# is at least to be times that.
_COMPARED = {
    "mlp": (
        (_OURS, "tf_keras_*", 1.7),
        (_OURS, "one_process_*", 0.95),
        (_ONE, _AT_ONE, 1.5),
        (_AUTO, _AT_ONE, 1.5),
        (_AUTO, _OURS, 0.97),
    ),
    "wide": ((_OURS, "tf_keras_*", 2.2), (_AUTO, _OURS, 0.97)),
}
_OTHERS = {"mlp": ("one_process_x10", "keras_x1"), "wide": ()}
# Marks a side whose tasks keep TensorFlow's number of threads.
TF_THREADS = "@tf_threads"


def compare(
    rates: Mapping[str, Sequence[float]],
    targets: Sequence[tuple[str, str, float]],
) -> dict[str, Any]:
    """Compares our sides with the best of others.

    Args:
        rates: Examples per second by side, in the order of the rounds.
        targets: Our side, a pattern of others' names, and the least ratio;
            left out where no side is so called.

    Returns:
        By both a judgement, with the side that was the best by the median.
    """
    found = {}
    for ours, rivals, target in targets:
        medians = {
            name: statistics.median(rates[name])
            for name in fnmatch.filter(rates, rivals)
        }
        if not medians:
            continue
        best = max(medians, key=lambda name: medians[name])
        ratios = measure.ratio_of(rates[ours], rates[best], best=max)
        found[f"{ours} / {rivals}"] = {
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
        The best of them, the very best with TensorFlow's own threads, and the
        best by single steps.
    """
    ranked = sorted(trials, key=lambda name: trials[name], reverse=True)
    at_one = fnmatch.filter(ranked, _AT_ONE)[:1]
    return [
        *dict.fromkeys([*ranked[:count], *at_one]),
        ranked[0] + TF_THREADS,
    ]


def rate(name: str, options: programs.Options, *, setting: str) -> float:
    """Trains one side in processes of its own.

    Args:
        name: A side such as `"tfdistill_x10"`, with `TF_THREADS` behind it
            or not. Workers and parameter servers have tfdistill's number of
            threads without it.
        options: Of the command line.
        setting: Key of `click_training.SETTINGS`.

    Returns:
        The median of its epochs' examples per second.

    Raises:
        RuntimeError: It failed.
    """
    text, _, threads = name.partition("@")
    side = parameter_server_task.Side.of(text)
    number = 0
    if not side.is_alone:
        number = click_training.SETTINGS[setting].num_workers
    with tempfile.TemporaryDirectory(prefix="tfdistill-bench-") as workdir:
        topology = local_cluster.LocalCluster(
            command=_command(text, setting, options),
            workdir=workdir,
            workers_per_group=number or 1,
            ps_per_group=number,
            env=_environ(own_threads=bool(threads)),
            worker_restarts=0,
        )
        with local_run.LocalRun(topology) as running:
            result = running.wait(timeout_secs=options.turn_timeout_secs)
        (group,) = result.groups
        if group.state != "done":
            lines = "\n".join(group.last_lines)
            raise RuntimeError(
                f"{name} must end well; it {group.state}: {group.reason}. "
                f"Its last lines:\n{lines}"
            )
        path = pathlib.Path(workdir, parameter_server_task.RESULT)
        return statistics.median(json.loads(path.read_text("utf-8")))


def _command(side: str, setting: str, options: programs.Options) -> list[str]:
    return [
        sys.executable,
        "-m",
        "benchmarks.parameter_server_task",
        f"--task={side}",
        f"--setting={setting}",
        f"--steps={options.steps}",
        f"--epochs={options.epochs}",
    ]


def _environ(*, own_threads: bool) -> dict[str, str]:
    root = str(pathlib.Path(__file__).resolve().parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([root, inherited] if inherited else [root])
    env = {"PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "2"}
    if own_threads:
        env["TF_NUM_INTRAOP_THREADS"] = str(os.cpu_count() or 1)
    return env


def _measure(setting: str, options: programs.Options) -> dict[str, Any]:
    def one_turn(name: str) -> float:
        return rate(name, options, setting=setting)

    trials = {}
    candidates = [
        f"{name}_x{steps}"
        for name in options.tf_keras
        for steps in options.steps_per_execution
    ]
    for name in candidates:
        trials[name] = one_turn(name) if len(candidates) > 1 else 0.0
        measure.log(f"{setting} trial: {name} {trials[name]:.0f}/s")
    theirs = [*kept(trials, options.keep), *_OTHERS[setting]]
    sides = [_OURS, _ONE, _AUTO, *theirs]
    rates = measure.interleave(
        {name: functools.partial(one_turn, name) for name in sides},
        rounds=options.rounds,
        warm_up_rounds=0,
    )
    return {
        "against": compare(rates, _COMPARED[setting]),
        "examples_per_second": {
            name: measure.summary(values) for name, values in rates.items()
        },
        "trials_of_tf_keras": {k: round(v, 1) for k, v in trials.items()},
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
    settings = {name: _measure(name, options) for name in options.settings}
    record["settings"] = settings
    record["met"] = all(
        one["met"]
        for found in settings.values()
        for one in found["against"].values()
    )
    record["machine"] = measure.machine()


def _add_options(options: programs.Program) -> None:
    for name, default, values, text, quick in (
        ("settings", ["mlp", "wide"], _COMPARED, "models to measure", ["mlp"]),
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
    options.add("keep", "sides of tf_keras in the rounds", 2, quick=1)
    for name, number, text, fewer in (
        ("steps", 200, "steps an epoch", 100),
        ("epochs", 3, "measured epochs a turn", 1),
        ("rounds", 5, "turns of each side", 1),
    ):
        options.add(name, text, number, quick=fewer)
    options.add("turn_timeout_secs", "limit of a turn", 300.0)


def _check(options: programs.Options) -> None:
    most = max([10, *options.steps_per_execution])
    if options.steps < most:
        raise programs.UsageError(
            f"--steps must be at least {most}, the steps of an execution; "
            f"received {options.steps}"
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

if __name__ == "__main__":
    PROGRAM.start()
