"""The command `tfdistill-doctor`: its checks, in order, and their report."""

import collections
import os
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator

from tfdistill.cluster import identity
from tfdistill.doctor import checks
from tfdistill.system import programs

DATA = "data"
_SLOW_STORAGE = (
    "The storage does not answer: look at the mount (mount, nfsstat, dmesg) "
    "and at the network; raise --limit_secs if it is only slow."
)
# Makes a check of what the library does not know, such as a recipe.
More = Callable[[identity.Cluster], checks.Check]


def _asked_for(
    options: programs.Options, more: More | None = None
) -> Iterator[checks.Check]:
    limit_secs = options.limit_secs
    cluster, results = checks.cluster_of(os.environ)
    yield checks.Check(checks.ENVIRONMENT, lambda: results, limit_secs)
    if cluster is None:
        return
    yield checks.Check(
        checks.REACH,
        lambda: checks.of_group(cluster, wait_secs=options.wait_secs),
        # An address that does not answer takes its time, too.
        options.wait_secs + 30.0,
        "Look at the network and at the name service.",
    )
    yield checks.Check(
        checks.EXCHANGE,
        lambda: checks.of_storage(cluster),
        limit_secs,
        _SLOW_STORAGE,
    )
    if options.no_tensorflow:
        return
    yield checks.Check(checks.TENSORFLOW, checks.of_tensorflow, limit_secs)
    if more is not None:
        yield more(cluster)
    yield checks.Check(
        checks.TEACHERS, lambda: _teachers(cluster), limit_secs, _SLOW_STORAGE
    )


def _teachers(cluster: identity.Cluster) -> Iterable[checks.Result]:
    # Only here: they import TensorFlow.
    from tfdistill.doctor import teachers
    from tfdistill.exchange import publisher

    return teachers.examine(
        publisher.Exchange(cluster.exchange),
        group=cluster.group,
        peers=cluster.peers,
    )


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
    """Examines this task as the options say; `more` makes a further check."""
    # What TensorFlow says of itself at its start is no finding.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    counts: collections.Counter[str] = collections.Counter()
    for asked in _asked_for(options, more):
        for result in checks.run(asked):
            checks.show(result)
            counts[result.status] += 1
    names = checks.OK, checks.WARNING, checks.FAILED, checks.SKIPPED
    print(", ".join(f"{counts[name]} {name}" for name in names))
    return checks.EXIT_FAILED if counts[checks.FAILED] else 0


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
