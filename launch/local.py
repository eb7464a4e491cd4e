"""Runs a script or a recipe as groups of tasks on this machine.

python -m launch.local --num_groups=2 --workdir=DIR -- python train.py
python -m launch.local --num_groups=2 --workdir=DIR --recipe=digits
"""

import argparse
import sys
from collections.abc import Sequence

from launch import recipe_options
from tfdistill.launcher import command as cli
from tfdistill.observe import profile_steps

_PROG = "python -m launch.local"


def _make_parser() -> argparse.ArgumentParser:
    parser = cli.make_parser(_PROG)
    parser.usage = (
        f"{_PROG} --workdir=DIR [options] -- COMMAND [ARGUMENT ...]\n"
        f"       {_PROG} --workdir=DIR [options] --recipe=NAME"
    )
    recipe_options.add(parser)
    parser.add_argument(
        "--profile_steps",
        metavar="FIRST:LAST",
        help="trace these steps of the recipe for TensorBoard's profiler",
    )
    return parser


def _command(options: argparse.Namespace, given: Sequence[str]) -> list[str]:
    """Returns the command of a task, once it is known that it can start."""
    command = recipe_options.command(
        options, given, python=sys.executable, workdir=options.workdir
    )
    traced = options.profile_steps
    if not traced:
        return command
    if options.recipe is None:
        raise ValueError(
            "--profile_steps traces a recipe; with a command set "
            f"{profile_steps.VARIABLE}={traced} or pass it to "
            "tfdistill.Summaries"
        )
    profile_steps.parse(traced)
    return [*command, f"--profile_steps={traced}"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments without the program's name. Default `sys.argv[1:]`.

    Returns:
        The exit code.
    """
    parser = _make_parser()
    arguments = sys.argv[1:] if argv is None else argv
    before, given = cli.split_command(arguments)
    options = parser.parse_args(before)
    try:
        command = _command(options, given)
    except ValueError as error:
        parser.error(str(error))
    # What is left describes the groups.
    del options.recipe, options.override, options.profile_steps
    return cli.run(parser, options, command)


if __name__ == "__main__":
    sys.exit(main())
