"""The command `tfdistill`: chooses the program that its first word names."""

import importlib
import sys

# In the order of their use.
COMMANDS = {
    "run": "run a script on this machine, in one or more groups",
    "compare": "check whether codistillation is worth it for a model",
    "status": "show the progress of a run",
    "doctor": "check a setup for problems before a run",
    "teach": "serve a group's newest version as a teacher",
    "label": "write a fixed teacher's soft targets for a recipe's examples",
    "promote": "copy a version of a run to TensorFlow Serving",
    "slurm": "write the batch script for a run on Slurm",
    "kubernetes": "write the manifests for a run on Kubernetes",
}
_EXIT_OPTIONS = 2


def _help() -> str:
    width = max(map(len, COMMANDS))
    rows = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "usage: tfdistill COMMAND [options]",
            "",
            "Codistillation for Keras 3: groups that teach each other.",
            "",
            *rows,
            "",
            "tfdistill COMMAND --help lists the options of a command.",
            "",
            "example:",
            "  tfdistill run --num-groups=2 my_train.py",
        ]
    )


def start() -> None:
    """Runs the command that the arguments of this process name, and exits."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("--help", "-h", "help"):
        print(_help())
        raise SystemExit(0)
    if name == "--version":
        version = importlib.import_module("tfdistill._version").__version__
        print(f"tfdistill {version}")
        raise SystemExit(0)
    if name not in COMMANDS:
        print(_help(), file=sys.stderr)
        print(
            f"\ntfdistill: the first argument must be a command; received "
            f"{name!r}.{_near(name)}",
            file=sys.stderr,
        )
        raise SystemExit(_EXIT_OPTIONS)
    program = importlib.import_module(f"tfdistill.commands.{name}").PROGRAM
    del sys.argv[1]
    program.start()


def _near(name: str) -> str:
    import difflib

    names = [*COMMANDS]
    if name.endswith(".py"):
        return f" Did you mean `tfdistill run {name}`?"
    found = difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {found[0]!r}?" if found else ""
