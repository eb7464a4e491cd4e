"""`tfdistill compare`, with the recipes of models/."""

import dataclasses

from tfdistill.commands import compare

PROGRAM = dataclasses.replace(compare.PROGRAM, name="python -m launch.compare")
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
