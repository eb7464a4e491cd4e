"""Runs a script or a recipe as groups of tasks on this machine.

python -m launch.local --num_groups=2 --workdir=DIR -- python train.py
python -m launch.local --num_groups=2 --workdir=DIR --recipe=digits
"""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

from launch import outputs
from launch import recipe_options
from tfdistill.launcher import command
from tfdistill.system import programs


def _add_options(options: programs.Flags) -> None:
    command.add_options(options)
    recipe_options.add(options)


def run(
    options: programs.Options,
    *,
    launch: Callable[..., Any] = command.run,
) -> int:
    """Runs all groups by a launcher; returns the exit code.

    If a group of a recipe fails, the results of the others are put together
    here, as no group can know that it is the last.
    """
    try:
        options.command = recipe_options.command(
            options, python=sys.executable, workdir=options.workdir
        )
        chosen = recipe_options.recipe(options)
    except ValueError as error:
        raise programs.UsageError(str(error)) from error
    result = launch(options)
    if chosen and result.exit_code:
        written = outputs.write_results_so_far(options.workdir, result.groups)
        if written is not None:
            try:
                said = f"results of the groups that are done: {written}"
                print(said, flush=True)
            except OSError:
                programs.forget_output()
    return result.exit_code


PROGRAM = dataclasses.replace(
    command.PROGRAM,
    name="python -m launch.local",
    usage=command.EITHER,
    define=_add_options,
    run=run,
)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
