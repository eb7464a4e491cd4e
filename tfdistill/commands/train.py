"""Runs one task of one group by a named recipe.

python -m tfdistill.commands.train --recipe=digits --workdir=DIR

A launcher starts one for each task, with TF_CONFIG and TFDISTILL_* set; with
none of them set it trains one group on this machine. If a run was stopped, the
same command resumes from each group's last backup.
"""

import dataclasses
import os
import sys
import traceback
from collections.abc import Mapping
from typing import Any
from typing import NoReturn

from absl import logging

import tfdistill
from tfdistill.cluster import ending
from tfdistill.cluster import signs
from tfdistill.commands import recipe_options
from tfdistill.recipes import outputs
from tfdistill.recipes import recipes
from tfdistill.system import programs

_WHAT = (
    "a recipe, a file or module with a function workload, or the config.json "
    "of an earlier run"
)
EXIT_DATA = 65


def _notes() -> str:
    described = {name: recipes.describe(name) for name in recipes.RECIPES}
    return (
        (
            f"{recipe_options.listing('recipes', described)}\n\n"
            * bool(described)
        )
        + "exit codes: 0 done, "
        "2 wrong options, 65 wrong data, 75 another task was lost,\n"
        "1 anything else"
    )


def _add_options(options: programs.Program) -> None:
    recipe_options.add(options, what=_WHAT)
    add = options.add
    add("workdir", "<DIR>: directory of the run; default TFDISTILL_WORKDIR")
    add("verbose", "show Keras' progress", False)
    add("print_config", "print the complete configuration and exit", False)


def _cluster(workdir: str | None) -> tfdistill.Cluster:
    """Returns this task with the workdir of the option or the environment."""
    cluster = tfdistill.Cluster.from_env()
    given = workdir or cluster.workdir
    if not given or "://" in given:
        raise ValueError(
            "The run needs a local directory; received workdir "
            f"{given!r}. Pass --workdir=DIR. TFDISTILL_EXCHANGE may be a URL."
        )
    path = os.path.abspath(given)
    if cluster.workdir and os.path.abspath(cluster.workdir) != path:
        raise ValueError(
            "--workdir and TFDISTILL_WORKDIR must agree; received "
            f"{workdir!r} and {cluster.workdir!r}. Leave one of them out."
        )
    return dataclasses.replace(cluster, workdir=path)


def _train(
    recipe: recipes.Recipe,
    cluster: tfdistill.Cluster,
    options: programs.Options,
) -> int:
    # Only here: wrong options are reported before seconds of imports.
    from tfdistill.recipes import task

    try:
        result = task.run(recipe, cluster, verbose=options.verbose)
    except Exception as error:
        return exit_code_of(error)
    if cluster.is_chief:
        _tell(result)
    return 0


def exit_code_of(error: Exception) -> int:
    """Reports what ended training; returns the exit code of the task."""
    from tfdistill import data
    from tfdistill.exchange import claim

    if isinstance(error, (recipes.OptionsError, claim.GroupClaimedError)):
        logging.error("wrong options: %s", error)
        return programs.EXIT_OPTIONS
    if isinstance(error, data.DataError):
        logging.error("wrong data: %s", error)
        return EXIT_DATA
    traceback.print_exception(error)
    if not (lost := ending.lost_task(error)):
        return programs.EXIT_FAILURE
    logging.error("lost another task of the group: %s", lost)
    return signs.EXIT_RETRY


def _tell(result: Mapping[str, Any]) -> None:
    figures = ", ".join(
        f"{name.replace('_', ' ')} {value:.4f}"
        for name, value in result["metrics"].items()
    )
    print(
        f"group {result['group']}: {result['steps']} steps, {figures}, "
        f"{result['examples_per_second']:,.0f} examples/s",
        flush=True,
    )


def _run(options: programs.Options) -> int:
    with programs.usage_errors(ValueError):
        recipe = recipe_options.recipe(options)
        if recipe is None:
            raise ValueError("--recipe=NAME is missing")
        if options.print_config:
            print(recipe.to_json(), end="")
            return 0
        cluster = _cluster(options.workdir)
        outputs.check_new(recipe, cluster)
    if outputs.is_complete(cluster):
        print(
            f"group {cluster.group}: complete, nothing to do; its results are "
            f"in {outputs.group_dir(str(cluster.workdir), cluster.group)}",
            flush=True,
        )
        return 0
    return _train(recipe, cluster, options)


class _Task(programs.Program):
    """Ends its process at once if it has failed."""

    def start(self) -> NoReturn:
        """Runs the task, and exits."""
        try:
            super().start()
        except SystemExit as end:
            if not end.code:
                raise
            # At a normal exit a worker waits for the others of its group; after
            # a failure they are not coming.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(int(end.code))


PROGRAM = _Task(
    name="python -m tfdistill.commands.train",
    usage="--recipe=NAME [options]",
    about="Runs one task of one group with a recipe.",
    notes=_notes(),
    define=_add_options,
    run=_run,
)
main = PROGRAM.main


if __name__ == "__main__":
    PROGRAM.start()
