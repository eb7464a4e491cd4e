"""The command `tfdistill`: chooses the program that its first word names."""

import importlib
import sys

from tfdistill import _version
from tfdistill.commands import contributed
from tfdistill.system import programs

# In the order of their use.
COMMANDS = {
    "run": "run a script on this machine, in one or more groups",
    "compare": "check whether codistillation is worth it for a model",
    "status": "show the progress of a run",
    "doctor": "check a setup for problems before a run",
    "teach": "serve a group's newest version as a teacher",
    "label": "write a fixed teacher's soft targets for a recipe's examples",
    "promote": "copy a version of a run to TensorFlow Serving",
    "line": "retrain a served model, judge the new one, promote or roll back",
    "slurm": "write the batch script for a run on Slurm",
    "kubernetes": "write the manifests for a run on Kubernetes",
}
# Found by their names: nothing in the library imports contrib.
_OF_CONTRIB = {"line": "tfdistill.contrib.line.command"}
_NOTES = """\
A Keras script runs as it stands:
  tfdistill run --workers-per-group=2 my_train.py    on two workers
  tfdistill run --workers-per-group=2 --ps-per-group=1 my_train.py
                                                     on parameter servers
  tfdistill run --num-groups=2 my_train.py           in groups that teach each
                                                     other
  tfdistill compare my_train.py                      is that worth it?
"""


def load(name: str) -> programs.Program | programs.Commands:
    """Returns the program of a command."""
    if name in _OF_CONTRIB:
        return contributed.program(_OF_CONTRIB[name], name)
    return importlib.import_module(f"tfdistill.commands.{name}").PROGRAM


_PROGRAM = programs.Commands(
    name="tfdistill",
    about="Distributed training and codistillation for Keras 3.",
    commands=COMMANDS,
    load=load,
    notes=_NOTES,
)


def start() -> None:
    """Runs the command that the arguments of this process name, and exits."""
    if sys.argv[1:2] == ["--version"]:
        print(f"tfdistill {_version.__version__}")
        raise SystemExit(0)
    _PROGRAM.start()
