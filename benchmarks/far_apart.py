"""Versions that groups hear over a slow line, whole and as deltas.

Trains a recipe in two groups, once for each way to publish, with the launcher's
line between them: of the versions that a group published, those that taught the
other. TFDISTILL_DATA names the data.
"""

import json
import pathlib
import sys
import tempfile
from typing import Any

from benchmarks import measure
from launch import recipes
from tfdistill.launcher import local_cluster
from tfdistill.launcher import local_run
from tfdistill.recipes import outputs
from tfdistill.system import programs

# Of the versions, as many as must be heard with deltas.
_TARGET = 0.99
_AUTO = {"every_steps": "auto"}


def _train(options: Any, exporter: dict[str, Any], seed: int) -> list[Any]:
    """Returns the results of both groups."""
    size = options.batch_size
    recipe = recipes.get(options.recipe).changed(
        {
            **({"batch_size": size} if size else {}),
            "seed": seed,
            "num_steps": options.steps,
            "evaluate_every_steps": options.steps,
            "every_steps": options.every_steps,
            "start_together_secs": 60.0,
            "exporter": exporter,
        }
    )
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory, "recipe.json")
        path.write_text(recipe.by_method("codistill").to_json())
        topology = local_cluster.LocalCluster(
            command=[
                *(sys.executable, "-m", "launch.train"),
                *(f"--recipe={path}", f"--workdir={directory}"),
            ],
            workdir=directory,
            num_groups=2,
            ps_per_group=options.ps_per_group,
            link_mbit_per_s=options.link_mbit_per_s,
            link_delay_ms=options.link_delay_ms,
        )
        with local_run.LocalRun(topology) as run:
            ended = run.wait(timeout_secs=3600)
        if ended.exit_code:
            raise RuntimeError(f"The run failed: {ended.groups}")
        found = pathlib.Path(directory, outputs.RESULTS).read_bytes()
    return json.loads(found)["groups"]


def _summary(results: list[Any]) -> dict[str, Any]:
    teachers = [result["teachers"][0] for result in results]
    exports = [result["exports"] for result in results]
    heard = sum(teacher["swaps"] for teacher in teachers)
    unheard = sum(teacher["num_unheard"] for teacher in teachers)
    secs = max(result["seconds"] for result in results)
    return {
        "heard": heard,
        "unheard": unheard,
        "share": round(heard / max(1, heard + unheard), 4),
        "published": sum(each["published"] for each in exports),
        "skipped": sum(each["skipped"] for each in exports),
        "every_steps": [each["every_steps"] for each in exports],
        "bytes_per_version": round(
            sum(each["bytes"] for each in teachers) / max(1, heard)
        ),
        "step_ms": round(1e3 * secs / results[0]["steps"], 1),
        "read_secs": [round(each["read_secs"] or 0, 2) for each in teachers],
        "lag_secs": [round(each["lag_secs"] or 0, 2) for each in teachers],
        "log_loss": round(
            sum(result["metrics"]["log_loss"] for result in results) / 2, 4
        ),
    }


def run(options: Any, record: dict[str, Any]) -> None:
    """Measures each way to publish."""
    deltas = {"key_every": options.key_every}
    sides = {
        "whole": {},
        "deltas": deltas,
        "int8": {**deltas, "variables_dtype": "int8"},
        "whole_auto": _AUTO,
        "deltas_auto": {**deltas, **_AUTO},
    }
    found = {}
    for name in options.sides.split(","):
        results = _train(options, sides[name], options.seed)
        found[name] = _summary(results)
        measure.log(f"{name}: {found[name]}")
    record.update(
        benchmark="far_apart",
        config=vars(options),
        machine=measure.machine(),
        **found,
        met=found.get("deltas", {}).get("share", 0) >= _TARGET,
    )


def _add_options(options: programs.Flags) -> None:
    options.add("recipe", "what is trained", "criteo_small")
    options.add("steps", "steps of each group", 1000, quick=200)
    options.add("batch_size", "rows of a step; 0: the recipe's", 0)
    options.add("every_steps", "steps between versions", 20)
    options.add("key_every", "versions for each whole one, of deltas", 20)
    options.add("ps_per_group", "parameter servers of a group", 0)
    options.add("link_mbit_per_s", "the line of a group; 0: no limit", 50.0)
    options.add("link_delay_ms", "of each request", 0.0)
    options.add(
        "sides",
        "which of whole, deltas, int8, whole_auto and deltas_auto",
        "whole,deltas,deltas_auto",
    )
    options.add("seed", "of the recipe", 0)


PROGRAM = measure.program("far_apart", __doc__, define=_add_options, run=run)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
