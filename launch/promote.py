"""`tfdistill promote`, with the recipes of models/."""

import dataclasses

from tfdistill.commands import promote

PROGRAM = dataclasses.replace(promote.PROGRAM, name="python -m launch.promote")
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
