"""The command `tfdistill-doctor`."""

import contextlib
import json
import os
import sys
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import NoReturn
from typing import TextIO

import rich.console
import rich.text

from tfdistill.doctor import check
from tfdistill.doctor import examination
from tfdistill.system import programs
from tfdistill.system import untrusted

FORMAT = 1
_STYLES = {
    check.OK: "green",
    check.WARNING: "yellow",
    check.FAILED: "bold red",
    check.SKIPPED: "dim",
}
_WIDTH = max(map(len, _STYLES))
_INDENT = " " * (_WIDTH + 2)


class Report:
    """Prints each result as it comes."""

    def __init__(self, stream: TextIO, *, plain: bool = False) -> None:
        """Does without colours even on a terminal if `plain`."""
        self._console = rich.console.Console(
            file=stream, no_color=plain or None, soft_wrap=True
        )

    def add(self, result: check.Result) -> None:
        """Prints one result: its status, what was seen, and the remedy."""
        line = rich.text.Text()
        line.append(f"{result.status:<{_WIDTH}}", _STYLES[result.status])
        line.append(f"  {result.name}: ")
        line.append(untrusted.one_line(result.seen, max_chars=2000))
        if result.remedy:
            line.append(f"\n{_INDENT}remedy: ", "bold")
            line.append(untrusted.one_line(result.remedy, max_chars=2000))
        self._console.print(line, soft_wrap=True)

    def end(self, results: Sequence[check.Result]) -> None:
        """Prints how many there were of each status."""
        self._console.print(summary(results), soft_wrap=True, highlight=False)


def summary(results: Sequence[check.Result]) -> str:
    """Returns how many results there are of each status."""
    counts = [
        f"{sum(r.status == status for r in results)} {status}"
        for status in _STYLES
    ]
    return ", ".join(counts)


def document(results: Sequence[check.Result]) -> dict[str, Any]:
    """Returns all results as one JSON document."""
    return {
        "format": FORMAT,
        "failed": sum(r.status == check.FAILED for r in results),
        "warnings": sum(r.status == check.WARNING for r in results),
        "results": [
            {
                "name": r.name,
                "status": r.status,
                "seen": r.seen,
                "remedy": r.remedy or None,
                "secs": round(r.secs, 3),
            }
            for r in results
        ],
    }


EXIT_FAILED = 1
_NOTES = """\
Run it exactly as each task will run: on its host, as its user, with its
TF_CONFIG and TFDISTILL_* variables. Run it for all tasks of a group at the same
time, so that they find each other. It trains nothing, and removes everything
that it writes.

Exit code: 0 if no check has failed, 1 if one has, 2 for wrong options.
"""


def add_options(options: programs.Flags) -> None:
    """Adds the options that any examination has."""
    add = options.add
    add("json", "print one JSON document", False)
    add("plain", "no colours, even on a terminal", False)
    add(
        "workdir",
        "<DIR>: a run whose groups learn from each other's predictions, alive "
        "or over: why they miss some",
    )
    add("no_reach", "do not look for the other tasks of the group", False)
    add(
        "no_tensorflow",
        "run only the checks that need no TensorFlow: no teachers, no data",
        False,
    )
    for name, text in (
        ("wait_secs", "longest wait for the other tasks"),
        ("limit_secs", "longest time for each other check"),
    ):
        add(name, text, 60.0)
        options.check_positive(name)


def examine(
    options: programs.Options, *, more: examination.More | None = None
) -> int:
    """Examines this task as the options say; `more` makes further checks."""
    # What TensorFlow says of itself at its start is no finding.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    code, ended = run(
        examination.Options(
            limit_secs=options.limit_secs,
            wait_secs=options.wait_secs,
            reach=not options.no_reach,
            tensorflow=not options.no_tensorflow,
            workdir=options.workdir or "",
        ),
        as_json=options.json,
        plain=options.plain,
        more=more,
    )
    return leave(code, ended, exit_now=os._exit)


def run(
    options: examination.Options,
    *,
    as_json: bool,
    plain: bool,
    more: examination.More | None = None,
) -> tuple[int, bool]:
    """Examines this task and prints what was found.

    Returns the exit code, and whether all checks have ended.
    """
    results: list[check.Result] = []
    ended = True
    report = Report(sys.stdout, plain=plain)
    # What data and libraries print must not break the document.
    aside = contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout)
    with aside:
        for result, has_ended in examination.examine(options, more=more):
            results.append(result)
            ended = ended and has_ended
            if not as_json:
                report.add(result)
    if as_json:
        print(json.dumps(document(results), indent=2), flush=True)
    else:
        report.end(results)
    bad = any(result.status == check.FAILED for result in results)
    return (EXIT_FAILED if bad else 0), ended


def leave(
    code: int, ended: bool, *, exit_now: Callable[[int], NoReturn]
) -> int:
    """Returns the exit code; ends the process if a check hangs."""
    if not ended:
        sys.stdout.flush()
        exit_now(code)
    return code


PROGRAM = programs.Program(
    name="tfdistill-doctor",
    about="Finds out before the first step why a run would fail.",
    notes=_NOTES,
    define=add_options,
    run=examine,
)
main, start = PROGRAM.main, PROGRAM.start

if __name__ == "__main__":
    start()
