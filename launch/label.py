"""`tfdistill label`, with the recipes of models/."""

import dataclasses

from tfdistill.commands import label

PROGRAM = dataclasses.replace(label.PROGRAM, name="python -m launch.label")
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
