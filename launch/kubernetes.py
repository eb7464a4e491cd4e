"""`tfdistill kubernetes`, with the recipes of models/."""

import launch

PROGRAM, main = launch.program("kubernetes", __name__)
