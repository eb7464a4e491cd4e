"""`tfdistill status`, with the recipes of models/."""

import launch

PROGRAM, main = launch.program("status", __name__)
