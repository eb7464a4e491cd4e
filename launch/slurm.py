"""`tfdistill slurm`, with the recipes of models/."""

import dataclasses

from tfdistill.commands import slurm

PROGRAM = dataclasses.replace(slurm.PROGRAM, name="python -m launch.slurm")
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
