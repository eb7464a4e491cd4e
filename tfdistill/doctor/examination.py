"""Which checks the doctor makes of one task, and in which order.

Those that need no TensorFlow come first.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

from tfdistill.cluster import identity
from tfdistill.doctor import check
from tfdistill.doctor import environment
from tfdistill.doctor import reach
from tfdistill.doctor import storage
from tfdistill.system import programs

DATA = "data"
TEACHERS = "teachers"
_SLOW_STORAGE = (
    "The storage does not answer: look at the mount (mount, nfsstat, dmesg) "
    "and at the network; raise --limit_secs if it is only slow."
)


# Makes the checks of what the library does not know, such as recipes.
More = Callable[[identity.Cluster], Iterable[check.Check]]


def checks(
    options: programs.Options, more: More | None = None
) -> Iterator[check.Check]:
    """Yields the checks that the options ask for; those of `more` come last."""
    limit_secs = options.limit_secs
    cluster, result = environment.cluster_of()
    yield check.Check(environment.ENVIRONMENT, lambda: [result], limit_secs)
    if cluster is None:
        return
    yield check.Check(
        environment.ENVIRONMENT, lambda: environment.peers(cluster), limit_secs
    )
    yield check.Check(
        environment.KEY,
        lambda: environment.key(num_groups=cluster.num_groups),
        limit_secs,
    )
    yield check.Check(
        reach.REACH,
        lambda: reach.examine(
            cluster, reach=not options.no_reach, wait_secs=options.wait_secs
        ),
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
        from tfdistill.exchange import reader as reader_lib

        reader = reader_lib.VersionReader(cluster.exchange)
        own = [*student] or [teachers.own_export(reader, cluster.group)]
        yield from teachers.examine(reader, cluster.peers, *own)

    return check.Check(TEACHERS, make, limit_secs, _SLOW_STORAGE)
