"""`tfdistill run`, with the recipes of models/."""

import dataclasses

from tfdistill.commands import run

PROGRAM = dataclasses.replace(run.PROGRAM, name="python -m launch.local")
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
