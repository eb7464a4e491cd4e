"""`tfdistill slurm`, with the recipes of models/."""

import launch

PROGRAM, main = launch.program("slurm", __name__)
