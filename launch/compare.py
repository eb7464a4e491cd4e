"""`tfdistill compare`, with the recipes of models/."""

import launch

PROGRAM, main = launch.program("compare", __name__)
