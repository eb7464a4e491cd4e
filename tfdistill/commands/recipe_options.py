"""The options --recipe, --method and --override, and what programs share.

Imports neither TensorFlow nor Keras.
"""

import textwrap
from collections.abc import Mapping

from tfdistill.commands import keras_script
from tfdistill.recipes import methods
from tfdistill.recipes import recipes
from tfdistill.system import programs

_WHAT = (
    "train a recipe instead of a script: its name, or a file or module with a "
    "function workload"
)


def add(options: programs.Program, *, what: str = _WHAT) -> None:
    """Adds the options; `what` describes --recipe."""
    options.section("recipe")
    options.add("recipe", f"<NAME>: {what}")
    options.add(
        "method",
        f"<NAME>: training method: {methods.NAMES}; default: the recipe's own",
    )
    recipes.add_override(options, "the recipe, such as learning_rate=0.1")


def recipe(options: programs.Options) -> recipes.Recipe | None:
    """Returns the recipe that was asked for; None without --recipe.

    A wrong recipe, method or override is a ValueError.
    """
    if options.recipe is not None:
        found = recipes.get(options.recipe)
        if options.method:
            found = found.by_method(options.method)
        return recipes.override(found, options.override)
    for name in ("override", "method"):
        if getattr(options, name):
            raise ValueError(
                f"--{name} changes a recipe; pass --recipe=NAME too"
            )
    return None


def command(
    options: programs.Options, *, python: str, workdir: str
) -> list[str]:
    """Returns what each task runs, once it is known that it can start.

    A ValueError if the recipe is wrong, or if there is a command besides, or
    neither. `python` and `workdir` are as the tasks see them.
    """
    if (options.recipe is None) == (not options.command):
        received = "both" if options.command else "neither"
        raise ValueError(
            "expected a script such as my_train.py, a command after --, or "
            f"--recipe=NAME; received {received}"
        )
    chosen = recipe(options)
    if chosen is None:
        first, *others = options.command
        if first == programs.PYTHON:
            return keras_script.command(options, others, python=python)
        return options.command
    name = options.recipe
    return [
        *(python, "-m", recipes.RECIPES.train_module),
        # A file is found by tasks that run in another directory, too.
        f"--recipe={recipes.place(name)}",
        f"--workdir={workdir}",
        *([f"--method={options.method}"] if options.method else []),
        *(f"--override={override}" for override in options.override),
    ]


def listing(title: str, items: Mapping[str, str]) -> str:
    """Returns names and what they are, for the notes of a program."""
    width = max(map(len, items), default=0)
    lines = [
        textwrap.fill(
            text,
            80,
            initial_indent=f"  {name:<{width}}  ",
            subsequent_indent=" " * (width + 4),
        )
        for name, text in items.items()
    ]
    return "\n".join([f"{title}:", *lines])
