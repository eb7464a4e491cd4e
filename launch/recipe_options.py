"""The options --recipe and --override, and what a launcher runs by them.

Imports neither TensorFlow nor Keras.
"""

import os

from launch import recipes
from launch.config import config as config_lib
from tfdistill.system import programs

_WHAT = "run launch.train with this recipe instead of a command"


def add(options: programs.Flags, *, what: str = _WHAT) -> None:
    """Adds both options; `what` describes --recipe."""
    options.section("recipe")
    options.add("recipe", f"<NAME>: {what}")
    recipes.add_override(
        options, "the recipe, such as optimizer.learning_rate=0.1"
    )


def config(options: programs.Options) -> config_lib.Config | None:
    """Returns the configuration that was asked for; None without --recipe.

    A wrong recipe or override is a ValueError.
    """
    if options.recipe is not None:
        return recipes.override(recipes.get(options.recipe), options.override)
    if options.override:
        raise ValueError("--override changes a recipe; pass --recipe=NAME too")
    return None


def command(
    options: programs.Options, *, python: str, workdir: str
) -> list[str]:
    """Returns what each task runs, once it is known that it can start.

    A ValueError if the recipe is wrong, or does not fit the groups; or if
    there is a command besides, or neither. `python` and `workdir` are as the
    tasks see them.
    """
    given = options.command
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
