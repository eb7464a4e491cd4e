"""The command `tfdistill`: chooses the program that its first word names."""

import functools
import importlib
import sys
from collections.abc import Callable

from absl import logging

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


_EXIT_INTERRUPTED = 130


def load(name: str) -> programs.Program | programs.Commands:
    """Returns the program of a command."""
    if name in _OF_CONTRIB:
        return _contributed(_OF_CONTRIB[name], name)
    return importlib.import_module(f"tfdistill.commands.{name}").PROGRAM


def _contributed(module: str, name: str) -> programs.Commands:
    """Returns the program of a module that has commands.

    It has the texts `ABOUT` and `NOTES`, and `COMMANDS`: by name what has the
    texts `about`, `usage` and `notes`, the packages that it `needs`, and the
    functions `define` and `run` of a `Program`.
    """
    found = importlib.import_module(module)

    def load_word(word: str) -> programs.Program:
        command = found.COMMANDS[word]
        return programs.Program(
            name=f"tfdistill {name} {word}",
            usage=command.usage,
            about=f"{command.about[0].upper()}{command.about[1:]}.",
            notes=command.notes,
            define=command.define,
            run=functools.partial(_resumable, command.run),
            needs=command.needs,
            reports=(OSError, RuntimeError, ValueError),
        )

    return programs.Commands(
        prog=f"tfdistill {name}",
        about=found.ABOUT,
        commands={word: one.about for word, one in found.COMMANDS.items()},
        load=load_word,
        notes=found.NOTES,
    )


def _resumable(
    run: Callable[[programs.Options], int], options: programs.Options
) -> int:
    try:
        return run(options)
    except KeyboardInterrupt:
        logging.error("Interrupted. The same command resumes.")
        return _EXIT_INTERRUPTED


_PROGRAM = programs.Commands(
    prog="tfdistill",
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
