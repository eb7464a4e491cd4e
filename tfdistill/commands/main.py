"""The command `tfdistill`: chooses the program that its first word names."""

import importlib
import sys

from tfdistill import _version
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


def _load(name: str) -> programs.Program | programs.Commands:
    return importlib.import_module(f"tfdistill.commands.{name}").PROGRAM


_PROGRAM = programs.Commands(
    name="tfdistill",
    about="Codistillation for Keras 3: groups that teach each other.",
    commands=COMMANDS,
    load=_load,
    notes="example:\n  tfdistill run --num-groups=2 my_train.py\n",
)


def start() -> None:
    """Runs the command that the arguments of this process name, and exits."""
    if sys.argv[1:2] == ["--version"]:
        print(f"tfdistill {_version.__version__}")
        raise SystemExit(0)
    _PROGRAM.start()
