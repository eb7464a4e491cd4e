"""`tfdistill line`, with the recipes of models/."""

import dataclasses

from tfdistill.commands import main as commands

PROGRAM = dataclasses.replace(
    commands.load("line"), name="python -m launch.line"
)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
