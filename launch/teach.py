"""`tfdistill teach`, with the recipes of models/."""

import launch

PROGRAM, main = launch.program("teach", __name__)
