"""Steps per second of `fit` on two workers: ours on Keras 3 beside tf_keras.

Two clusters of real processes run at the same time: one trains with
tfdistill, one with tf_keras, the line of Keras that TensorFlow supports under
MultiWorkerMirroredStrategy. They take turns by files, so that only one of
them works at any moment. Both start from the same weights, read the same
data, and compute the same metrics. Every turn builds and traces its model anew,
because equal graphs of one model were seen to run at rates 1.5 times apart.
"""

import json
import os
import pathlib
import sys
import tempfile
import time
from typing import Any

from benchmarks import measure
from benchmarks import multiworker_task
from tfdistill.launcher import local_cluster
from tfdistill.launcher import local_run
from tfdistill.system import programs

_NUM_WORKERS = 2


def _arguments(options: programs.Options) -> list[str]:
    """Writes the options out for the tasks."""
    return [
        f"--{name}" if each is True else f"--{name}={each}"
        for name, value in vars(options).items()
        if name != "task"
        for each in (value if isinstance(value, list) else [value])
        if each is not False
    ]


def _launch(options: programs.Options, workdir: str) -> None:
    root = str(pathlib.Path(__file__).resolve().parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([root, inherited] if inherited else [root])
    topology = local_cluster.LocalCluster(
        command=[sys.executable, "-m", "benchmarks.multiworker", "--task"]
        + _arguments(options),
        workdir=workdir,
        num_groups=len(set(multiworker_task.GROUP_OF_SIDE.values())),
        workers_per_group=_NUM_WORKERS,
        env={"PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "2"},
    )
    num_turns = len(list(multiworker_task.turns(options)))
    deadline = time.monotonic() + options.timeout_secs
    num_done = 0
    with local_run.LocalRun(topology) as running:
        while not running.over and time.monotonic() < deadline:
            running.poll()
            seen = len(list(pathlib.Path(workdir).glob("turn_*")))
            if seen > num_done:
                num_done = seen
                measure.log(f"{num_done} of {num_turns} turns are done")
        result = running.wait(timeout_secs=0.0)
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


def run(options: programs.Options, record: dict[str, Any]) -> None:
    """Runs both clusters and fills the record, which will be printed."""
    with tempfile.TemporaryDirectory(prefix="tfdistill-bench-") as workdir:
        _launch(options, workdir)
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


def _add_options(options: programs.Program) -> None:
    for name, default, values, text, quick in (
        (
            "models",
            ["mlp", "cnn"],
            multiworker_task.MODELS,
            "what is trained",
            ["mlp"],
        ),
        (
            "batches",
            list(multiworker_task.BATCHES),
            multiworker_task.BATCHES,
            "whether the batch size is known before the start",
            ["static"],
        ),
    ):
        options.add(name, text, default, enum_values=list(values), quick=quick)
    options.add(
        "steps_per_execution", "steps that one call of the graph makes", [1, 10]
    )
    options.add("batch_size", "of both workers together", 128)
    options.add("steps", "steps a turn", 80)
    options.add("rounds", "turns of each side", 7, quick=3)
    options.add("timeout_secs", "limit of the whole run", 3000.0)
    options.add("task", "be one of the tasks it starts", False)


def _run(options: programs.Options) -> int:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if options.steps < 2 * max(options.steps_per_execution):
        raise programs.UsageError(
            "--steps must be at least twice --steps_per_execution; received "
            f"{options.steps} and {max(options.steps_per_execution)}"
        )
    if options.task:
        multiworker_task.Worker(options).work()
        return 0
    with measure.one_json_line() as record:
        run(options, record)
    return 0


PROGRAM = programs.Program(
    name="python -m benchmarks.multiworker",
    about=__doc__,
    define=_add_options,
    run=_run,
)

if __name__ == "__main__":
    PROGRAM.start()
