"""`tfdistill status`, with the recipes of models/."""

import dataclasses

from tfdistill.commands import status

PROGRAM = dataclasses.replace(status.PROGRAM, name="python -m launch.status")
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
