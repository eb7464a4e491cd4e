"""The command `tfdistill status`: how a run is that was started elsewhere."""

import time

from tfdistill.status import group
from tfdistill.status import observed_run
from tfdistill.status import tables
from tfdistill.system import programs
from tfdistill.system import run_files

_INTERVAL_SECS = 2.0
BAD_STATES = ("failed", "silent")
_NOTES = """\
The command only reads files in DIR. A group is

  starting, running, restarting, done, failed, stopped
            according to its launcher's events and its own metrics
  silent    if it has written nothing for --silent-secs (five minutes while it
            starts)

Exit code: 0 after showing the status; 2 for wrong options or if DIR has no run;
with --check, 1 if a group has failed or is silent; 130 after Ctrl-C without
--watch; 141 if the program that reads the output ends, such as `| head`.

example:
  tfdistill status /tmp/run --watch
"""


def _add_options(options: programs.Program) -> None:
    options.add_argument(
        "workdir",
        nargs="?",
        metavar="DIR",
        default=run_files.LAST,
        help="directory of the run; default: ./%(default)s",
    )
    add = options.add
    add("watch", "keep showing the status until the run is over", False)
    add("check", "exit with 1 if a group has failed or is silent", False)
    add(
        "silent_secs",
        "a group that has written nothing for this long is silent",
        60.0,
        kind=programs.positive,
    )


def _show(run: observed_run.ObservedRun) -> group.RunStatus:
    seen, console = run.look(), tables.console()
    console.print(tables.view(seen, console))
    return seen


def _watch(run: observed_run.ObservedRun) -> group.RunStatus:
    """Shows the run until it is over: by lines, if not on a terminal."""
    with tables.display(alone=True) as display:
        while True:
            seen = run.look()
            display.show(seen)
            if seen.over:
                return seen
            time.sleep(_INTERVAL_SECS)


def _run(options: programs.Options) -> int:
    with programs.usage_errors():
        run = observed_run.ObservedRun(
            options.workdir, silent_secs=options.silent_secs
        )
    try:
        seen = _watch(run) if options.watch else _show(run)
    except KeyboardInterrupt:
        return 0 if options.watch else 130
    bad = any(status.state in BAD_STATES for status in seen.groups)
    return programs.EXIT_FAILURE if options.check and bad else 0


PROGRAM = programs.Program(
    name="tfdistill status",
    usage="[DIR] [options]",
    about="Shows the progress of each group of a run.",
    notes=_NOTES,
    define=_add_options,
    run=_run,
    reports=(BrokenPipeError,),
)
main = PROGRAM.main
