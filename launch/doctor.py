"""`tfdistill doctor`, with the recipes of models/."""

import dataclasses

from tfdistill.commands import doctor

PROGRAM = dataclasses.replace(doctor.PROGRAM, name="python -m launch.doctor")
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
