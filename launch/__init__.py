"""The programs of the wheel, with the recipes of models/; nothing imports them.

`python -m launch.local` is `tfdistill run`, and each other module is the
command of its name.
"""

from collections.abc import Callable
from typing import Any

import models
from tfdistill.recipes import recipes as recipes

recipes.RECIPES.register(models.RECIPES, train="launch.train")


def program(
    name: str, module: str, *, command: str = ""
) -> tuple[Any, Callable[..., int]]:
    """Returns a module's program, and its `main`; starts it as `__main__`.

    It is the command of that name, unless another is given.
    """
    from tfdistill.commands import main

    made = main.load(command or name).named(f"python -m launch.{name}")
    if module == "__main__":
        made.start()
    return made, made.main
