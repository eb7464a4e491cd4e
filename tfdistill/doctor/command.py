"""The command `tfdistill-doctor`."""

import argparse
import contextlib
import json
import math
import os
import sys
from collections.abc import Callable
from collections.abc import Sequence
from typing import NoReturn

from tfdistill.doctor import check
from tfdistill.doctor import examination
from tfdistill.doctor import report

EXIT_FAILED, EXIT_OPTIONS = 1, 2
_EPILOG = """\
Run it as each task will be run: on its host, as its user, with its TF_CONFIG
and TFDISTILL_* variables; on all tasks of a group at the same time, so that
they find each other. It trains nothing, and removes what it writes.

Exit code: 0 if no check has failed, 1 if one has, 2 for wrong options.
"""


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Returns the parser of the options.

    Args:
        prog: Name of the program in messages.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Finds out before the first step why a run would fail.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON document")
    add("--plain", action="store_true", help="no colours, even on a terminal")
    add(
        "--no_reach",
        action="store_true",
        help="do not look for the other tasks of the group",
    )
    add(
        "--no_tensorflow",
        action="store_true",
        help="only the checks that do without TensorFlow: no teachers, no data",
    )
    for name, text in (
        ("wait_secs", "longest wait for the other tasks"),
        ("limit_secs", "longest time for each other check"),
    ):
        add(
            f"--{name}",
            type=float,
            default=60.0,
            metavar="SECS",
            help=f"{text}; default 60",
        )
    return parser


def examination_options(
    parser: argparse.ArgumentParser, parsed: argparse.Namespace
) -> examination.Options:
    """Returns what to examine.

    Args:
        parser: Reports a wrong option, which exits with code 2.
        parsed: The parsed options of `make_parser`.
    """
    for name in ("wait_secs", "limit_secs"):
        value = getattr(parsed, name)
        if not (math.isfinite(value) and value > 0):
            parser.error(f"--{name} must be > 0; received {value}")
    return examination.Options(
        limit_secs=parsed.limit_secs,
        wait_secs=parsed.wait_secs,
        reach=not parsed.no_reach,
        tensorflow=not parsed.no_tensorflow,
    )


def run(
    options: examination.Options,
    *,
    as_json: bool,
    plain: bool,
    more: examination.More | None = None,
) -> tuple[int, bool]:
    """Examines this task, and prints what was found.

    Args:
        options: What to examine.
        as_json: Whether to print one JSON document.
        plain: Whether to do without colours.
        more: Makes further checks.

    Returns:
        The exit code, and whether all checks have ended.
    """
    results: list[check.Result] = []
    ended = True
    told = report.Report(sys.stdout, plain=plain)
    # What data and libraries print must not break the document.
    aside = contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout)
    with aside:
        for result, has_ended in examination.examine(options, more=more):
            results.append(result)
            ended = ended and has_ended
            if not as_json:
                told.add(result)
    if as_json:
        print(json.dumps(report.document(results), indent=2), flush=True)
    else:
        told.end(results)
    bad = any(result.status == check.FAILED for result in results)
    return (EXIT_FAILED if bad else 0), ended


def leave(
    code: int, ended: bool, *, exit_now: Callable[[int], NoReturn]
) -> int:
    """Ends the process where a check that hangs would keep it.

    Args:
        code: The exit code.
        ended: Whether all checks have ended.
        exit_now: Ends the process without waiting for anybody.

    Returns:
        The exit code.
    """
    if not ended:
        sys.stdout.flush()
        exit_now(code)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments without the program's name. Default `sys.argv[1:]`.

    Returns:
        The exit code.
    """
    parser = make_parser("tfdistill-doctor")
    parsed = parser.parse_args(argv)
    options = examination_options(parser, parsed)
    # What TensorFlow says of itself at its start is no finding.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    code, ended = run(options, as_json=parsed.json, plain=parsed.plain)
    return leave(code, ended, exit_now=os._exit)


if __name__ == "__main__":
    sys.exit(main())
