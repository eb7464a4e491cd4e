"""One task of a recipe, with the recipes of models/."""

import launch

PROGRAM, main = launch.program("train", __name__)
