"""The command `tfdistill-status`: how a run is that was started elsewhere."""

import argparse
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Sequence

import rich.console

from tfdistill.status import group
from tfdistill.status import observed_run
from tfdistill.status import tables

EXIT_CHECK, EXIT_OPTIONS, EXIT_PIPE = 1, 2, 141
BAD_STATES = ("failed", "lost", "silent")
_EPILOG = """\
Only files are read: those of DIR, and the manifests in the exchange. A group is

  starting, running, stopping, restarting, done, failed, stopped
            as its launcher's events and its own metrics tell
  silent    if it has written nothing for --silent_secs (five minutes while it
            starts)
  lost      if its launcher and all its tasks ran on this machine and are gone
            without having told
  unknown   if it is seen in the exchange alone

Exit code: 0 once the status was shown; 2 for wrong options or no run in DIR;
with --check 1 if a group has failed, is lost or is silent; 130 after Ctrl-C
without --watch; 141 if nobody reads on, as after `| head`.

example:
  tfdistill-status /tmp/run --watch
"""


def _make_parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Shows how far each group of a run has come.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("workdir", metavar="DIR", help="directory of the run")
    add(
        "--exchange",
        metavar="URL",
        help="directory or URL of the exchange; default: what the launcher was "
        "told, or DIR/exchange. A URL takes TensorFlow, and its seconds to "
        "load",
    )
    add("--watch", action="store_true", help="show it until the run is over")
    add(
        "--interval_secs",
        type=float,
        default=2.0,
        metavar="SECS",
        help="with --watch: time between two looks; default 2",
    )
    add("--json", action="store_true", help="print one JSON document")
    add(
        "--check",
        action="store_true",
        help="exit with code 1 if a group has failed, is lost or is silent",
    )
    add(
        "--silent_secs",
        type=float,
        default=60.0,
        metavar="SECS",
        help="a group that has not written for so long is silent; default 60",
    )
    return parser


def _check(
    parser: argparse.ArgumentParser, options: argparse.Namespace
) -> None:
    for name in ("interval_secs", "silent_secs"):
        value = getattr(options, name)
        if not (math.isfinite(value) and value > 0):
            parser.error(f"--{name} must be > 0; received {value}")
    if options.json and options.watch:
        parser.error("expected at most one of --json and --watch")


def _show(run: group.RunStatus, *, workdir: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps(tables.document(workdir, run), indent=2))
        return
    console = rich.console.Console()
    if console.is_terminal:
        console.print(tables.view(run, width=console.width))
    else:
        print("\n".join(tables.lines(run)))


def _watch(
    run: observed_run.ObservedRun, interval_secs: float
) -> group.RunStatus:
    """Shows the run until it is over."""
    display = tables.Display(errors=True)
    with contextlib.closing(display):
        while True:
            seen = run.look()
            display.show(seen)
            if seen.over:
                return seen
            time.sleep(interval_secs)


def main(argv: Sequence[str] | None = None, *, prog: str | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments without the program's name. Default `sys.argv[1:]`.
        prog: Name of the program in messages. Default `tfdistill-status`.

    Returns:
        The exit code.
    """
    parser = _make_parser(prog or "tfdistill-status")
    options = parser.parse_args(argv)
    _check(parser, options)
    try:
        run = observed_run.ObservedRun(
            options.workdir,
            exchange=options.exchange,
            silent_secs=options.silent_secs,
        )
    except observed_run.NoRunError as error:
        parser.error(str(error))
    try:
        if options.watch:
            seen = _watch(run, options.interval_secs)
        else:
            # A URL has TensorFlow loaded first.
            limit_secs = 60.0 if "://" in run.exchange else 5.0
            seen = run.look(limit_secs=limit_secs)
            _show(seen, workdir=options.workdir, as_json=options.json)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 0 if options.watch else 130
    except BrokenPipeError:
        # Whoever read has seen enough, as `head` has; nor may the flush at the
        # interpreter's end fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    bad = any(status.state in BAD_STATES for status in seen.groups)
    return EXIT_CHECK if options.check and bad else 0


if __name__ == "__main__":
    sys.exit(main())
