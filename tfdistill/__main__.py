"""Runs an ordinary Keras script: `python -m tfdistill train.py`.

`python -m tfdistill run train.py` is the command `tfdistill run train.py`, and
so for the other commands.
"""

import sys

from tfdistill.commands import keras_script
from tfdistill.commands import main
from tfdistill.system import programs

if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in main.COMMANDS:
        main.start()
    program = keras_script.PROGRAM
    try:
        # Not by `program.main`: what a script lacks is not ours to explain.
        raise SystemExit(keras_script.run(program.parse(sys.argv[1:])))
    except programs.UsageError as error:
        program.error(str(error))
