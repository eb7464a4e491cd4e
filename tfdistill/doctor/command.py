"""The command `tfdistill-doctor`."""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

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


def show(console: rich.console.Console, result: check.Result) -> None:
    """Prints one result: its status, what was seen, and the remedy."""
    line = rich.text.Text()
    line.append(f"{result.status:<{_WIDTH}}", _STYLES[result.status])
    line.append(f"  {result.name}: ")
    line.append(untrusted.one_line(result.seen, max_chars=2000))
    if result.remedy:
        line.append(f"\n{_INDENT}remedy: ", "bold")
        line.append(untrusted.one_line(result.remedy, max_chars=2000))
    console.print(line, soft_wrap=True)


def _count(results: Sequence[check.Result], status: str) -> int:
    return sum(result.status == status for result in results)


def document(results: Sequence[check.Result]) -> dict[str, Any]:
    """Returns all results as one JSON document."""
    return {
        "format": FORMAT,
        "failed": _count(results, check.FAILED),
        "warnings": _count(results, check.WARNING),
        "results": [
            dataclasses.asdict(result)
            | {"remedy": result.remedy or None, "secs": round(result.secs, 3)}
            for result in results
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
        add(name, text, 60.0, kind=programs.positive)


def examine(
    options: programs.Options, *, more: examination.More | None = None
) -> int:
    """Examines this task as the options say; `more` makes further checks."""
    # What TensorFlow says of itself at its start is no finding.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    console = rich.console.Console(
        file=sys.stdout, no_color=options.plain or None, soft_wrap=True
    )
    results: list[check.Result] = []
    all_ended = True
    # What data and libraries print must not break the document.
    aside = sys.stderr if options.json else sys.stdout
    with contextlib.redirect_stdout(aside):
        for asked in examination.checks(options, more):
            found, ended = check.run(asked)
            results += found
            all_ended = all_ended and ended
            for result in () if options.json else found:
                show(console, result)
    if options.json:
        print(json.dumps(document(results), indent=2), flush=True)
    else:
        console.print(
            ", ".join(f"{_count(results, name)} {name}" for name in _STYLES),
            highlight=False,
        )
    code = EXIT_FAILED if _count(results, check.FAILED) else 0
    if not all_ended:
        # The thread of a check that hangs would keep the process.
        sys.stdout.flush()
        os._exit(code)
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
