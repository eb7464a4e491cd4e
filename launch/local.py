"""Runs a script or a recipe as groups of tasks on this machine.

python -m launch.local --num_groups=2 --workdir=DIR -- python train.py
python -m launch.local --num_groups=2 --workdir=DIR --recipe=digits
"""

import argparse
import sys
from collections.abc import Sequence

from tfdistill import local_cluster_cli as cli
from tfdistill import profile_steps

_PROG = "python -m launch.local"


def _make_parser() -> argparse.ArgumentParser:
    parser = cli.make_parser(_PROG)
    parser.usage = (
        f"{_PROG} --workdir=DIR [options] -- COMMAND [ARGUMENT ...]\n"
        f"       {_PROG} --workdir=DIR [options] --recipe=NAME"
    )
    parser.add_argument(
        "--recipe",
        metavar="NAME",
        help="run launch.train with this recipe instead of a command",
    )
    parser.add_argument(
        "--override",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="change one field of the recipe, such as "
        "optimizer.learning_rate=0.1; may be repeated",
    )
    parser.add_argument(
        "--profile_steps",
        metavar="FIRST:LAST",
        help="trace these steps of the recipe for TensorBoard's profiler",
    )
    return parser


def _recipe_command(
    recipe: str,
    workdir: str,
    overrides: Sequence[str],
    traced: str | None,
) -> list[str]:
    return [
        sys.executable,
        "-m",
        "launch.train",
        f"--recipe={recipe}",
        f"--workdir={workdir}",
        *(f"--override={override}" for override in overrides),
        *([f"--profile_steps={traced}"] if traced else []),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments without the program's name. Default `sys.argv[1:]`.

    Returns:
        The exit code.
    """
    parser = _make_parser()
    arguments = sys.argv[1:] if argv is None else argv
    before, command = cli.split_command(arguments)
    options = parser.parse_args(before)
    recipe, overrides = options.recipe, options.override
    traced = options.profile_steps
    del options.recipe, options.override, options.profile_steps
    if (recipe is None) == (not command):
        parser.error("expected either --recipe=NAME or a command after --")
    if overrides and recipe is None:
        parser.error("--override changes a recipe; pass --recipe=NAME too")
    if traced and recipe is None:
        parser.error(
            "--profile_steps traces a recipe; with a command set "
            f"{profile_steps.VARIABLE}={traced} or pass it to "
            "tfdistill.Summaries"
        )
    if traced:
        try:
            profile_steps.parse(traced)
        except ValueError as error:
            parser.error(str(error))
    for override in overrides:
        if "=" not in override:
            parser.error(f"--override must be FIELD=VALUE; received {override}")
    if recipe is not None:
        command = _recipe_command(recipe, options.workdir, overrides, traced)
    return cli.run(parser, options, command)


if __name__ == "__main__":
    sys.exit(main())
