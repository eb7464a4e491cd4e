"""The options --recipe and --override, and what a launcher runs by them.

Imports neither TensorFlow nor Keras.
"""

import argparse
import os
from collections.abc import Sequence

from launch import recipes
from launch.config import config as config_lib

_WHAT = "run launch.train with this recipe instead of a command"


def add(parser: argparse.ArgumentParser, *, what: str = _WHAT) -> None:
    """Adds both options.

    Args:
        parser: Of the program.
        what: What --recipe is for. Default: for a launcher.
    """
    parser.add_argument("--recipe", metavar="NAME", help=what)
    parser.add_argument(
        "--override",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="change one field of the recipe, such as "
        "optimizer.learning_rate=0.1; may be repeated",
    )


def config(options: argparse.Namespace) -> config_lib.Config | None:
    """Returns the configuration that was asked for; None without --recipe.

    Args:
        options: With those of `add`.

    Raises:
        ValueError: The recipe or an override is wrong.
    """
    if options.recipe is not None:
        return recipes.override(recipes.get(options.recipe), options.override)
    if options.override:
        raise ValueError("--override changes a recipe; pass --recipe=NAME too")
    return None


def command(
    options: argparse.Namespace,
    given: Sequence[str],
    *,
    python: str,
    workdir: str,
) -> list[str]:
    """Returns what each task runs, once it is known that it can start.

    Args:
        options: With those of `add`, and with `num_groups`,
            `workers_per_group` and `ps_per_group`.
        given: The command after `--`; empty if there is none.
        python: Python of the tasks.
        workdir: Directory of the run, as the tasks see it.

    Raises:
        ValueError: The recipe is wrong, or does not fit the groups; or there
            is a command besides, or neither.
    """
    if (options.recipe is None) == (not given):
        raise ValueError("expected either --recipe=NAME or a command after --")
    chosen = config(options)
    if chosen is None:
        return list(given)
    chosen.check_num_groups(options.num_groups)
    if not options.ps_per_group:
        chosen.data.check_num_workers(options.workers_per_group)
    recipe = options.recipe
    if recipe not in recipes.RECIPES:
        # A file, which tasks that run in another directory must find, too.
        recipe = os.path.abspath(recipe)
    return [
        python,
        "-m",
        "launch.train",
        f"--recipe={recipe}",
        f"--workdir={workdir}",
        *(f"--override={override}" for override in options.override),
    ]
