"""`tfdistill run`, with the recipes of models/."""

import launch

PROGRAM, main = launch.program("local", __name__, command="run")
