"""`tfdistill promote`, with the recipes of models/."""

import launch

PROGRAM, main = launch.program("promote", __name__)
