"""Finds out before the first step why a run would fail, and what to do.

python -m launch.doctor
python -m launch.doctor --recipe=NAME [--override=FIELD=VALUE]...

Run as each task will be run, with TF_CONFIG and TFDISTILL_* set.
"""

import os
import sys
from collections.abc import Sequence

from launch import recipe_checks
from launch import recipe_options
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
    recipe_options.add(
        parser,
        what="a recipe, or the config.json of a run: its data are read, and "
        "teachers compared with its student",
    )
    parsed = parser.parse_args(argv)
    options = command.examination_options(parser, parsed)
    try:
        config = recipe_options.config(parsed)
    except ValueError as error:
        parser.error(str(error))
    more: examination.More | None = None
    if config is not None:
        more = recipe_checks.RecipeChecks(config, limit_secs=options.limit_secs)
    # What TensorFlow says of itself at its start is no finding.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    code, ended = command.run(
        options, as_json=parsed.json, plain=parsed.plain, more=more
    )
    return command.leave(code, ended, exit_now=os._exit)


if __name__ == "__main__":
    sys.exit(main())
