"""Runs an ordinary Keras script: `python -m tfdistill train.py`."""

import sys

from tfdistill.commands import keras_script
from tfdistill.system import programs

if __name__ == "__main__":
    program = keras_script.PROGRAM
    try:
        # Not by `program.main`: what a script lacks is not ours to explain.
        raise SystemExit(program.run(program.parse(sys.argv[1:])))
    except programs.UsageError as error:
        program.parser().error(str(error))
