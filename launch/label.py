"""`tfdistill label`, with the recipes of models/."""

import launch

PROGRAM, main = launch.program("label", __name__)
