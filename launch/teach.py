"""`tfdistill teach`, with the recipes of models/."""

import dataclasses

from tfdistill.commands import teach

PROGRAM = dataclasses.replace(teach.PROGRAM, name="python -m launch.teach")
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
