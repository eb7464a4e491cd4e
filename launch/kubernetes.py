"""`tfdistill kubernetes`, with the recipes of models/."""

import dataclasses

from tfdistill.commands import kubernetes

PROGRAM = dataclasses.replace(
    kubernetes.PROGRAM, name="python -m launch.kubernetes"
)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
