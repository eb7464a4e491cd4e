"""The command `tfdistill-doctor`: its checks, in order, and their report."""

import collections
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import rich.console
import rich.text

from tfdistill.cluster import identity
from tfdistill.doctor import check
from tfdistill.doctor import environment
from tfdistill.doctor import reach
from tfdistill.doctor import storage
from tfdistill.system import programs
from tfdistill.system import untrusted

DATA = "data"
TEACHERS = "teachers"
_SLOW_STORAGE = (
    "The storage does not answer: look at the mount (mount, nfsstat, dmesg) "
    "and at the network; raise --limit_secs if it is only slow."
)
FORMAT = 1
_STYLES = {
    check.OK: "green",
    check.WARNING: "yellow",
    check.FAILED: "bold red",
    check.SKIPPED: "dim",
}
_WIDTH = max(map(len, _STYLES))
_INDENT = " " * (_WIDTH + 2)
# Makes the checks of what the library does not know, such as recipes.
More = Callable[[identity.Cluster], Iterable[check.Check]]


def checks(
    options: programs.Options, more: More | None = None
) -> Iterator[check.Check]:
    """Yields the checks that the options ask for; those of `more` come last."""
    limit_secs = options.limit_secs
    cluster, results = environment.cluster_of(os.environ)
    yield check.Check(environment.ENVIRONMENT, lambda: results, limit_secs)
    if cluster is None:
        return
    yield check.Check(
        reach.REACH,
        lambda: reach.examine(cluster, wait_secs=options.wait_secs),
        # An address that does not answer takes its time, too.
        options.wait_secs + 30.0,
        "Look at the network and at the name service.",
    )
    yield check.Check(
        storage.EXCHANGE,
        lambda: storage.examine(cluster),
        limit_secs,
        _SLOW_STORAGE,
    )
    if options.no_tensorflow:
        return
    yield check.Check(
        environment.TENSORFLOW, environment.of_tensorflow, limit_secs
    )
    if more is None:
        yield teachers_check(cluster, limit_secs)
    else:
        yield from more(cluster)


def teachers_check(
    cluster: identity.Cluster, limit_secs: float, student: Sequence[Any] = ()
) -> check.Check:
    """Returns the check of the newest versions of a group's peers.

    `student` has the `StudentGraph` to compare them with by then; without one
    the group's own newest version stands for it.
    """

    def make() -> Iterator[check.Result]:
        # Only here: they import TensorFlow.
        from tfdistill.doctor import teachers
        from tfdistill.exchange import publisher

        reader = publisher.Exchange(cluster.exchange)
        own = (
            teachers.of_graph(student[0])
            if student
            else teachers.own_export(reader, cluster.group)
        )
        yield from teachers.examine(reader, cluster.peers, own)

    return check.Check(TEACHERS, make, limit_secs, _SLOW_STORAGE)


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


EXIT_FAILED = 1
_NOTES = """\
Run it exactly as each task will run: on its host, as its user, with its
TF_CONFIG and TFDISTILL_* variables. Run it for all tasks of a group at the same
time, so that they find each other. It trains nothing, and removes everything
that it writes.

Exit code: 0 if no check has failed, 1 if one has, 2 for wrong options.
"""


def add_options(options: programs.Flags) -> None:
    """Adds the options that the doctor always has."""
    add = options.add
    add("json", "print one JSON document", False)
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


def examine(options: programs.Options, *, more: More | None = None) -> int:
    """Examines this task as the options say; `more` makes further checks."""
    # What TensorFlow says of itself at its start is no finding.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    console = rich.console.Console(file=sys.stdout, soft_wrap=True)
    results: list[check.Result] = []
    all_ended = True
    # What data and libraries print must not break the document.
    aside = sys.stderr if options.json else sys.stdout
    with contextlib.redirect_stdout(aside):
        for asked in checks(options, more):
            found, ended = check.run(asked)
            results += found
            all_ended = all_ended and ended
            for result in () if options.json else found:
                show(console, result)
    counts = collections.Counter(result.status for result in results)
    if options.json:
        document = {
            "format": FORMAT,
            "failed": counts[check.FAILED],
            "warnings": counts[check.WARNING],
            "results": [
                dataclasses.asdict(result) | {"remedy": result.remedy or None}
                for result in results
            ],
        }
        print(json.dumps(document, indent=2), flush=True)
    else:
        console.print(
            ", ".join(f"{counts[name]} {name}" for name in _STYLES),
            highlight=False,
        )
    code = EXIT_FAILED if counts[check.FAILED] else 0
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
