"""`tfdistill line`, with the recipes of models/."""

import launch

PROGRAM, main = launch.program("line", __name__)
