"""Shows how far a run has come that was started elsewhere.

python -m launch.status DIR [--watch] [--check]
"""

import dataclasses

from tfdistill.status import command

PROGRAM = dataclasses.replace(command.PROGRAM, name="python -m launch.status")

if __name__ == "__main__":
    PROGRAM.start()
