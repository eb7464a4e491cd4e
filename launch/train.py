"""One task of a recipe, with the recipes of models/."""

import dataclasses

from tfdistill.commands import train

PROGRAM = dataclasses.replace(train.PROGRAM, name="python -m launch.train")
main = PROGRAM.main

if __name__ == "__main__":
    train.start(PROGRAM)
