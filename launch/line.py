"""`tfdistill line`, with the recipes of models/."""

import dataclasses

from tfdistill.commands import line

PROGRAM = dataclasses.replace(line.PROGRAM, name="python -m launch.line")
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
