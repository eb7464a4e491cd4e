"""`tfdistill doctor`, with the recipes of models/."""

import launch

PROGRAM, main = launch.program("doctor", __name__)
