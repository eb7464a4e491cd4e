"""Which checks the doctor makes of one task, and in which order.

Those that need no TensorFlow come first.
"""

import dataclasses
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator

from tfdistill.cluster import identity
from tfdistill.doctor import check
from tfdistill.doctor import environment
from tfdistill.doctor import network
from tfdistill.doctor import storage
from tfdistill.exchange import signing

DATA = "data"
TEACHERS = "teachers"
_SLOW_STORAGE = (
    "The storage does not answer: look at the mount (mount, nfsstat, dmesg) "
    "and at the network; raise --limit_secs if it is only slow."
)
_SLOW = "Raise --limit_secs if this machine is only slow."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to examine.

    Attributes:
        limit_secs: Longest time of each check.
        wait_secs: Longest wait for the other tasks of the group.
        reach: Whether to look for them.
        tensorflow: Whether to make the checks that need TensorFlow.
    """

    limit_secs: float = 60.0
    wait_secs: float = 60.0
    reach: bool = True
    tensorflow: bool = True


# Makes the checks of what the library does not know, such as recipes.
More = Callable[[identity.Cluster], Iterable[check.Check]]


def examine(
    options: Options, *, more: More | None = None
) -> Iterator[tuple[check.Result, bool]]:
    """Yields each result as it comes, and whether its check has ended.

    Args:
        options: What to examine.
        more: Makes further checks, which come last.
    """
    limit = options.limit_secs

    def made(name: str, make: Callable[[], Iterable[check.Result]]) -> _Results:
        return _run(
            check.Check(name=name, limit_secs=limit, make=make, remedy=_SLOW)
        )

    yield from made(environment.VERSIONS, environment.of_packages)
    yield from made(environment.VERSIONS, lambda: [environment.of_backend()])
    cluster, result = environment.cluster_of()
    yield result, True
    num_groups = cluster.num_groups if cluster else 2
    yield from made(
        environment.KEY, lambda: environment.key(num_groups=num_groups)
    )
    if cluster is None:
        for name in (
            network.ADDRESS,
            network.REACH,
            storage.EXCHANGE,
            TEACHERS,
        ):
            yield (
                check.skipped(name, "the environment must be right first"),
                True,
            )
        return
    yield from made(environment.ENVIRONMENT, lambda: environment.peers(cluster))
    yield from _network(cluster, options)
    yield from _storages(cluster, limit)
    if options.tensorflow:
        yield from made(environment.TENSORFLOW, environment.of_tensorflow)
        yield from _last(cluster, options, more)


_Results = Iterator[tuple[check.Result, bool]]


def _run(asked: check.Check) -> _Results:
    results, ended = check.run(asked)
    for result in results:
        yield result, ended


def _network(cluster: identity.Cluster, options: Options) -> _Results:
    if cluster.address is None:
        yield (
            check.skipped(network.ADDRESS, "one task, without TF_CONFIG"),
            True,
        )
        yield check.skipped(network.REACH, "one task: nobody to reach"), True
        return
    station, result = network.open_station(cluster, _signer())
    yield result, True
    if station is None:
        yield (
            check.skipped(network.REACH, "its own address comes first"),
            True,
        )
        return
    try:
        yield from _others(cluster, station, options)
    finally:
        station.close()


def _signer() -> signing.Signer | None:
    try:
        return signing.signer_for("environment")
    except ValueError:
        return None  # The check of the key has told.


def _others(
    cluster: identity.Cluster,
    station: network.Station,
    options: Options,
) -> _Results:
    if sum(map(len, cluster.spec.values())) == 1:
        yield check.skipped(network.REACH, "one task: nobody to reach"), True
    elif not options.reach:
        yield check.skipped(network.REACH, "not asked for (--no_reach)"), True
    else:
        yield from _run(
            check.Check(
                name=network.REACH,
                # An address that does not answer takes its time, too.
                limit_secs=options.wait_secs + 30.0,
                make=lambda: network.others(
                    cluster, station, wait_secs=options.wait_secs
                ),
                remedy="Look at the network and at the name service.",
            )
        )


def _storages(cluster: identity.Cluster, limit_secs: float) -> _Results:
    def made(name: str, make: Callable[[], Iterable[check.Result]]) -> _Results:
        return _run(
            check.Check(
                name=name,
                limit_secs=limit_secs,
                make=make,
                remedy=_SLOW_STORAGE,
            )
        )

    root, workdir = cluster.exchange, cluster.workdir
    if root is None:
        yield check.skipped(storage.EXCHANGE, "no exchange is set"), True
    else:
        yield from made(storage.EXCHANGE, lambda: storage.exchange(root))
        yield from made(
            storage.EXCHANGE,
            lambda: [
                storage.space(
                    root, name=storage.EXCHANGE, num_groups=cluster.num_groups
                )
            ],
        )
        yield from made(
            storage.CLOCK, lambda: storage.clocks(root, cluster.num_groups)
        )
    if workdir is None:
        yield check.skipped(storage.WORKDIR, "no workdir is set"), True
    else:
        yield from made(
            storage.WORKDIR,
            lambda: storage.exchange(workdir, name=storage.WORKDIR),
        )
        yield from made(
            storage.WORKDIR,
            lambda: [storage.space(workdir, name=storage.WORKDIR)],
        )


def _last(
    cluster: identity.Cluster, options: Options, more: More | None
) -> _Results:
    """Makes the checks that take TensorFlow, the recipe's in place of ours."""
    if more is None:
        checks: Iterable[check.Check] = [
            teachers_check(cluster, options.limit_secs)
        ]
        yield (
            check.skipped(DATA, "without --recipe nothing is known of it"),
            True,
        )
    else:
        checks = more(cluster)
    for asked in checks:
        yield from _run(asked)


def teachers_check(
    cluster: identity.Cluster,
    limit_secs: float,
    *,
    peers: Callable[[], tuple[int, ...]] | None = None,
    student: Callable[[], object] | None = None,
) -> check.Check:
    """Returns the check of the peers' newest versions.

    Args:
        cluster: This task.
        limit_secs: Longest time it may take.
        peers: Returns the groups to learn from. Default: all others.
        student: Returns the `teachers.Student` to compare with. Default: the
            group's own newest version.
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
