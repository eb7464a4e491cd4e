"""Which checks the doctor makes of one task, and in which order.

Those that need no TensorFlow come first.
"""

import dataclasses
import functools
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator

from tfdistill.cluster import identity
from tfdistill.doctor import check
from tfdistill.doctor import environment
from tfdistill.doctor import network
from tfdistill.doctor import predictions
from tfdistill.doctor import storage
from tfdistill.exchange import signing

DATA = "data"
TEACHERS = "teachers"
_SLOW_STORAGE = (
    "The storage does not answer: look at the mount (mount, nfsstat, dmesg) "
    "and at the network; raise --limit_secs if it is only slow."
)
_SLOW_NETWORK = "Look at the network and at the name service."
_SLOW = "Raise --limit_secs if this machine is only slow."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to examine, how long each check and the wait for others may take.

    `workdir` is of a run whose groups learn from each other's predictions: all
    of its groups are examined. Without it, this task's own group, if it runs.
    """

    limit_secs: float = 60.0
    wait_secs: float = 60.0
    reach: bool = True
    tensorflow: bool = True
    workdir: str = ""


# Makes the checks of what the library does not know, such as recipes.
More = Callable[[identity.Cluster], Iterable[check.Check]]


def examine(
    options: Options, *, more: More | None = None
) -> Iterator[tuple[check.Result, bool]]:
    """Yields each result as it comes, and whether its check has ended.

    The checks that `more` makes come last.
    """
    for asked in _checks(options, more):
        results, ended = check.run(asked)
        for result in results:
            yield result, ended


def _checks(options: Options, more: More | None) -> Iterator[check.Check]:
    new = functools.partial(
        check.Check, limit_secs=options.limit_secs, remedy=_SLOW
    )
    yield new(name=environment.VERSIONS, make=environment.of_packages)
    yield new(name=environment.VERSIONS, make=environment.of_backend)
    cluster, result = environment.cluster_of()
    yield new(name=environment.ENVIRONMENT, make=lambda: [result])
    num_groups = cluster.num_groups if cluster else 2
    yield new(
        name=environment.KEY,
        make=lambda: environment.key(num_groups=num_groups),
    )
    if cluster is None:
        yield new(name=environment.ENVIRONMENT, make=_nothing_to_examine)
        return
    yield new(
        name=environment.ENVIRONMENT, make=lambda: environment.peers(cluster)
    )
    yield new(
        name=network.REACH,
        make=lambda: network.examine(
            cluster,
            _signer(),
            reach=options.reach,
            wait_secs=options.wait_secs,
        ),
        # An address that does not answer takes its time, too.
        limit_secs=options.wait_secs + 30.0,
        remedy=_SLOW_NETWORK,
    )
    on_storage = functools.partial(new, remedy=_SLOW_STORAGE)
    for name, make in storage.checks(cluster):
        yield on_storage(name=name, make=make)
    workdir = options.workdir or cluster.workdir
    if workdir is not None:
        groups = None if options.workdir else (cluster.group,)
        yield on_storage(
            name=predictions.NAME,
            make=lambda: predictions.examine(workdir, groups=groups),
        )
    if not options.tensorflow:
        return
    yield new(name=environment.TENSORFLOW, make=environment.of_tensorflow)
    if more is not None:
        yield from more(cluster)
        return
    unknown = check.skipped(DATA, "without --recipe nothing is known of it")
    yield new(name=DATA, make=lambda: [unknown])
    yield teachers_check(cluster, options.limit_secs)


def _nothing_to_examine() -> Iterator[check.Result]:
    for name in (network.ADDRESS, network.REACH, storage.EXCHANGE, TEACHERS):
        yield check.skipped(name, "the environment must be right first")


def _signer() -> signing.Signer | None:
    try:
        return signing.signer_for("environment")
    except ValueError:
        return None  # The check of the key has reported it.


def teachers_check(
    cluster: identity.Cluster,
    limit_secs: float,
    *,
    peers: Callable[[], tuple[int, ...]] | None = None,
    student: Callable[[], object] | None = None,
) -> check.Check:
    """Returns the check of the newest versions of a group's peers.

    `peers` returns the groups to learn from (default: all others), and
    `student` the `teachers.Student` to compare them with (default: the group's
    own newest version).
    """

    def make() -> Iterator[check.Result]:
        # Only here: they import TensorFlow.
        from tfdistill.doctor import teachers
        from tfdistill.exchange import reader as reader_lib

        reader = reader_lib.VersionReader(cluster.exchange)
        found = student() if student else None
        if not isinstance(found, teachers.Student):
            found = teachers.own_export(reader, cluster.group)
        yield from teachers.examine(
            reader, peers() if peers else cluster.peers, found
        )

    return check.Check(
        name=TEACHERS, limit_secs=limit_secs, make=make, remedy=_SLOW_STORAGE
    )
