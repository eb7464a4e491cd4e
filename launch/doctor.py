"""Finds out before the first step why a run would fail, and what to do.

python -m launch.doctor
python -m launch.doctor --recipe=NAME [--override=FIELD=VALUE]...

Run as each task will be run, with TF_CONFIG and TFDISTILL_* set.
"""

import os
import sys
from collections.abc import Sequence

from launch import recipe_checks
from launch import recipes
from tfdistill.doctor import command
from tfdistill.doctor import examination


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments without the program's name. Default `sys.argv[1:]`.

    Returns:
        The exit code.
    """
    parser = command.make_parser("python -m launch.doctor")
    parser.add_argument(
        "--recipe",
        metavar="NAME",
        help="a recipe, or the config.json of a run: its data are read, and "
        "teachers compared with its student",
    )
    parser.add_argument(
        "--override",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="change one field of the recipe; may be repeated",
    )
    parsed = parser.parse_args(argv)
    options = command.examination_options(parser, parsed)
    if parsed.override and parsed.recipe is None:
        parser.error("--override changes a recipe; pass --recipe=NAME too")
    more: examination.More | None = None
    if parsed.recipe is not None:
        try:
            config = recipes.override(
                recipes.get(parsed.recipe), parsed.override
            )
        except ValueError as error:
            parser.error(str(error))
        more = recipe_checks.RecipeChecks(config, limit_secs=options.limit_secs)
    # What TensorFlow says of itself at its start is no finding.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    code, ended = command.run(
        options, as_json=parsed.json, plain=parsed.plain, more=more
    )
    return command.leave(code, ended, exit_now=os._exit)


if __name__ == "__main__":
    sys.exit(main())
