"""`tfdistill line`, with the recipes of models/."""

import dataclasses

from tfdistill.contrib.line import command

PROGRAM = dataclasses.replace(command.PROGRAM, name="python -m launch.line")
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
