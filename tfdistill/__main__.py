"""Runs an ordinary Keras script: `python -m tfdistill train.py`."""

from tfdistill.commands import keras_script

if __name__ == "__main__":
    raise SystemExit(keras_script.PROGRAM.main())
