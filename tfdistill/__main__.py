"""Runs an ordinary Keras script: `python -m tfdistill train.py`."""

import sys

from tfdistill.commands import keras_script
from tfdistill.system import programs

if __name__ == "__main__":
    program = keras_script.PROGRAM
    try:
        # Not by `program.main`: what a script lacks is not ours to explain.
        raise SystemExit(keras_script.run(program.parse(sys.argv[1:])))
    except programs.UsageError as error:
        program.error(str(error))
