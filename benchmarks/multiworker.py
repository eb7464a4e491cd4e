"""Steps per second of `fit` on two workers: ours on Keras 3 beside tf_keras.

Usage: python -m benchmarks.multiworker [--rounds=7]

Two clusters of real processes run at the same time: one trains with
tfdistill, one with tf_keras, the line of Keras that TensorFlow supports under
MultiWorkerMirroredStrategy. They take turns by files, so that only one of
them works at any moment. Both start from the same weights, read the same
data, and compute the same metrics. Every turn builds and traces its model anew,
because equal graphs of one model were seen to run at rates 1.5 times apart.
"""

import argparse
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from benchmarks import measure
from benchmarks import multiworker_task
from tfdistill.launcher import local_cluster
from tfdistill.launcher import local_run

_NUM_WORKERS = 2


def _launch(argv: Sequence[str], workdir: str, timeout_secs: float) -> None:
    root = str(pathlib.Path(__file__).resolve().parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([root, inherited] if inherited else [root])
    topology = local_cluster.LocalCluster(
        command=[sys.executable, "-m", "benchmarks.multiworker", "--task"]
        + list(argv),
        workdir=workdir,
        num_groups=len(set(multiworker_task.GROUP_OF_SIDE.values())),
        workers_per_group=_NUM_WORKERS,
        env={"PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "2"},
    )
    with local_run.LocalRun(topology) as running:
        result = running.wait(timeout_secs=timeout_secs)
    for group in result.groups:
        if group.state != "done":
            lines = "\n".join(group.last_lines)
            raise RuntimeError(
                f"Group {group.group} must end well; it {group.state}: "
                f"{group.reason}. Its last lines:\n{lines}"
            )


def _read_results(workdir: str) -> dict[str, dict[str, Any]]:
    """Returns what the chiefs measured: by setting, then by side."""
    merged: dict[str, dict[str, Any]] = {}
    for group in set(multiworker_task.GROUP_OF_SIDE.values()):
        text = pathlib.Path(
            workdir, multiworker_task.RESULT.format(group)
        ).read_text("utf-8")
        for name, sides in json.loads(text).items():
            merged.setdefault(name, {}).update(sides)
    return merged


def _compare(sides: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    rates = {side: found["steps_per_second"] for side, found in sides.items()}
    ours, wrapped = (
        measure.ratio_of(rates[side], rates["tf_keras"], best=max)
        for side in ("tfdistill", "codistill_model")
    )
    return {
        **measure.judge(ours["of_medians"], at_least=1.0),
        "ratios": ours,
        "codistill_model_ratios": wrapped,
        "steps_per_second": {
            side: measure.summary(values) for side, values in rates.items()
        },
        "final_loss": {side: found["loss"] for side, found in sides.items()},
        "bound": model,
    }


def run(
    argv: Sequence[str], options: argparse.Namespace, record: dict[str, Any]
) -> None:
    """Runs both clusters and fills the record.

    Args:
        argv: The arguments that the options were parsed from.
        options: The parsed options of `main`.
        record: What will be printed.
    """
    with tempfile.TemporaryDirectory(prefix="tfdistill-bench-") as workdir:
        _launch(argv, workdir, options.timeout_secs)
        results = _read_results(workdir)
    bounds = {name: _bound(name, options.batch_size) for name in options.models}
    settings = {
        setting.name: _compare(results[setting.name], bounds[setting.model])
        for setting in multiworker_task.settings(options)
    }
    worst = min(settings.values(), key=lambda found: found["ratio"])
    record.update(
        benchmark="multiworker",
        config={k: v for k, v in vars(options).items() if k != "task"},
        ratio=worst["ratio"],
        target=worst["target"],
        met=all(found["met"] for found in settings.values()),
        settings=settings,
        machine=measure.machine(),
    )


def _bound(name: str, batch_size: int) -> dict[str, Any]:
    """What each step must at least compute and send."""
    import keras

    model = multiworker_task.build(keras, name)
    flops = measure.forward_flops(model, batch_size)
    return {
        "gradient_bytes_per_step": 4 * model.count_params(),
        # A backward pass is about two forward passes.
        "gigaflops_per_step": round(3 * flops / 1e9, 5),
    }


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add(
        "--models",
        nargs="+",
        choices=multiworker_task.MODELS,
        default=["mlp", "cnn"],
    )
    add(
        "--batches",
        nargs="+",
        choices=multiworker_task.BATCHES,
        default=list(multiworker_task.BATCHES),
    )
    add("--steps_per_execution", nargs="+", type=int, default=[1, 10])
    add("--batch_size", type=int, default=128, help="of both workers together")
    add("--steps", type=int, default=80, help="steps a turn")
    add("--rounds", type=int, default=7)
    add("--timeout_secs", type=float, default=3000.0, help="of the whole run")
    add("--task", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.steps < 2 * max(options.steps_per_execution):
        parser.error(
            "--steps must be at least twice --steps_per_execution; received "
            f"{options.steps} and {max(options.steps_per_execution)}"
        )
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark and prints one line of JSON.

    Args:
        argv: Arguments without the program's name. Default `sys.argv[1:]`.

    Returns:
        The exit code.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    arguments = sys.argv[1:] if argv is None else list(argv)
    options = _parse(arguments)
    if options.task:
        multiworker_task.Worker(options).work()
        return 0
    with measure.one_json_line() as record:
        run(arguments, options, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
