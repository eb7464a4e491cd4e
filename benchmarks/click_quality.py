"""AUC and log loss of a DLRM with cross layers: ours beside tf_keras.

The recipes `criteo_dcn`, on rows of Criteo's log, and `clicks_dcn` train in one
process, and on two workers with two parameter servers; so does the same model
of tf_keras' layers. All begin with the same weights, and read the same batches
in as many steps. By side: the figures on held-out rows, with 95% intervals over
seeds, and those of their differences from our `fit` in one process.
"""

import json
import os
import sys
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from benchmarks import click_quality_task
from benchmarks import measure
from benchmarks import parameter_server
from tfdistill.system import programs

# By log: the recipe, and what makes it short enough.
_SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "criteo": (
        "criteo_dcn",
        {
            "learning_rate": 6e-3,
            "initial_accumulator_value": 1e-6,
            "batch_size": 128,
            "num_steps": 300,
            "evaluate_every_steps": 300,
            "steps_per_execution": 5,
            "field_sizes": 2000,
            "min_count": 5,
            "bottom_units": [64],
            "num_crosses": 2,
            "rank": 32,
            "top_units": [128, 64],
        },
    ),
    "clicks": ("clicks_dcn", {"steps_per_execution": 5}),
}
_NUM_WORKERS = 2
# In nats: what servers may cost more than those of tf_keras, at 95%.
_TARGET = 0.002
_BASE = "one_process"

Quality = Mapping[str, float]


def compare(found: Mapping[str, Sequence[Quality]]) -> dict[str, Any]:
    """Compares the sides on one log.

    Args:
        found: By side, its AUC and log loss of each seed.

    Returns:
        By side, the estimate of each, and of the difference from `one_process`;
        and whether our servers are as good as those of tf_keras.
    """
    sides = {
        name: {
            figure: measure.over_seeds([one[figure] for one in values])
            for figure in ("auc", "log_loss")
        }
        | {
            f"{figure}_less_{_BASE}": measure.difference_over_seeds(
                values, found[_BASE], figure
            )
            for figure in ("auc", "log_loss")
            if name != _BASE
        }
        for name, values in found.items()
    }
    worse = measure.difference_over_seeds(
        found["servers"], found["tf_keras_servers"], "log_loss"
    )
    interval = worse["interval"]
    return {
        "sides": sides,
        "log_loss_less_tf_keras": worse,
        "target": _TARGET,
        "met": bool(interval and interval[1] <= _TARGET),
    }


def train(
    log: str, side: str, *, seeds: int, timeout_secs: float
) -> list[Quality]:
    """Trains one side in processes of its own, with each seed.

    Args:
        log: `"criteo"` or `"clicks"`.
        side: Of `click_quality_task.SIDES`.
        seeds: How many.
        timeout_secs: For all of it.

    Returns:
        The quality on held-out rows, by seed.
    """
    recipe, changes = _SETTINGS[log]
    _, on_servers = click_quality_task.SIDES[side]
    return parameter_server.train_in_cluster(
        [
            sys.executable,
            "-m",
            "benchmarks.click_quality_task",
            f"--side={side}",
            f"--recipe={recipe}",
            f"--changes={json.dumps(changes)}",
            f"--seeds={seeds}",
        ],
        name=side,
        num_workers=_NUM_WORKERS if on_servers else 0,
        timeout_secs=timeout_secs,
    )


def run(options: programs.Options, record: dict[str, Any]) -> None:
    """Trains what was asked for and fills the record.

    Args:
        options: The options of the command line.
        record: What will be printed.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    record.update(benchmark="click_quality", config=dict(vars(options)))
    logs = {}
    for log in options.logs:
        found = {}
        for side in click_quality_task.SIDES:
            found[side] = train(
                log,
                side,
                seeds=options.seeds,
                timeout_secs=options.side_timeout_secs,
            )
            measure.log(f"{log}: {side} {found[side]}")
        logs[log] = compare(found)
    record["logs"] = logs
    record["met"] = all(one["met"] for one in logs.values())
    record["machine"] = measure.machine()


def _add_options(options: programs.Flags) -> None:
    options.add(
        "logs",
        "whose clicks",
        list(_SETTINGS),
        enum_values=list(_SETTINGS),
        quick=["clicks"],
    )
    # One seed has no interval.
    options.add("seeds", "trainings of each side", 8, quick=2)
    options.add("side_timeout_secs", "limit of a side", 1200.0)


PROGRAM = measure.program(
    "click_quality", __doc__, define=_add_options, run=run
)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
