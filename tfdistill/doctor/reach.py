"""Is this task's address its own, and do the tasks of its group find it?

TensorFlow's own words for two swapped addresses, or for a port that another
process holds, are a start that never ends.
"""

import errno
import hashlib
import time
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping

from tfdistill import cluster as cluster_lib
from tfdistill import signing
from tfdistill.doctor import check
from tfdistill.doctor import environment
from tfdistill.doctor import station as station_lib

ADDRESS = "address"
REACH = "reach"
CLOCK = "clock"
MAX_CLOCK_SECS = 5.0
_RETRY_SECS = 0.5
# For the others to hear of what this task has found out already.
_LINGER_SECS = 5.0
_SAME_CONFIG = (
    "Give all tasks of a group the same cluster in TF_CONFIG, in the same "
    "order, and the same TFDISTILL_GROUP and TFDISTILL_NUM_GROUPS."
)


def identity_of(cluster: cluster_lib.Cluster) -> str:
    """Returns what all tasks of one group have in common, as a digest."""
    jobs = sorted((job, list(hosts)) for job, hosts in cluster.spec.items())
    text = f"{cluster.group} of {cluster.num_groups}: {jobs}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def open_station(
    cluster: cluster_lib.Cluster, signer: signing.Signer | None = None
) -> tuple[station_lib.Station | None, check.Result]:
    """Listens on this task's own address, and looks whether it leads here.

    Args:
        cluster: This task, with an address.
        signer: Of the run's key, if there is one.

    Returns:
        What answers there, to be closed; None if it cannot; and the result.
    """
    address = str(cluster.address)
    port = int(address.rpartition(":")[2])
    try:
        station = station_lib.Station(
            task=cluster.task_name,
            identity=identity_of(cluster),
            port=port,
            signer=signer,
        )
    except OSError as error:
        return None, _no_port(cluster, port, error)
    try:
        answer = station.ask(address)
        problem = ""
        if answer.station != station.name:
            problem = f"is answered by another process, {answer.task}"
    except station_lib.NoAnswerError as error:
        problem = str(error)
    if problem:
        return station, check.failed(
            ADDRESS,
            f"{address}, the address of {cluster.task_name}, does not lead to "
            f"this host: it {problem}",
            "Start this task on the host that TF_CONFIG names for it, or "
            "correct its index or its address there; look at the firewall.",
        )
    return station, check.ok(
        ADDRESS, f"{address} is free, and leads to this host"
    )


def _no_port(
    cluster: cluster_lib.Cluster, port: int, error: OSError
) -> check.Result:
    if error.errno == errno.EADDRINUSE:
        return check.failed(
            ADDRESS,
            f"port {port} of {cluster.task_name} is taken by another process",
            f"Find it with `ss -ltnp 'sport = :{port}'` and end it, such as a "
            "task of an earlier run; or give the task another port in every "
            "task's TF_CONFIG. The doctor runs before the tasks, not beside "
            "them.",
        )
    return check.failed(
        ADDRESS,
        f"{cluster.task_name} may not listen on port {port}: {error.strerror}",
        "Choose a port from 1024 up in every task's TF_CONFIG.",
    )


def others(
    cluster: cluster_lib.Cluster,
    station: station_lib.Station,
    *,
    wait_secs: float,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[check.Result]:
    """Looks for all other tasks of the group, and waits until they have, too.

    Args:
        cluster: This task.
        station: What answers at its address.
        wait_secs: Longest time; the others must be examined meanwhile.
        clock: Seconds that never go backwards.
    """
    addresses = {
        f"{job}:{index}": address
        for job, hosts in cluster.spec.items()
        for index, address in enumerate(hosts)
        if (job, index) != (cluster.task_type, cluster.task_index)
    }
    answers: dict[str, station_lib.Answer] = {}
    problems: dict[str, str] = {}
    deadline = clock() + wait_secs
    while True:
        for name in addresses.keys() - answers.keys():
            try:
                answers[name] = station.ask(
                    addresses[name], timeout_secs=min(5.0, wait_secs)
                )
            except station_lib.NoAnswerError as error:
                problems[name] = str(error)
        unheard = addresses.keys() - station.heard.keys()
        if len(answers) == len(addresses) and not unheard:
            break
        if any(a.task != name for name, a in answers.items()):
            # It will not get better, but others shall find it out, too.
            deadline = min(deadline, clock() + _LINGER_SECS)
        if clock() >= deadline:
            break
        time.sleep(_RETRY_SECS)
    yield from _judge(cluster, station, addresses, answers, problems)


def _judge(
    cluster: cluster_lib.Cluster,
    station: station_lib.Station,
    addresses: Mapping[str, str],
    answers: Mapping[str, station_lib.Answer],
    problems: Mapping[str, str],
) -> Iterator[check.Result]:
    good = []
    for name, address in sorted(addresses.items()):
        answer = answers.get(name)
        if answer is None:
            yield check.failed(
                REACH,
                f"{name} at {address} {problems[name]}",
                f"Run the doctor as {name} at the same time (--wait_secs says "
                "how long this one waits); if it does run, open its port in "
                "the firewall, or correct its address in TF_CONFIG.",
            )
        elif answer.task != name:
            yield check.failed(
                REACH,
                f"{address}, the address of {name}, is answered by "
                f"{answer.task}",
                f"Swap the two addresses, or the indices of {name} and "
                f"{answer.task}, in TF_CONFIG. {_SAME_CONFIG}",
            )
        elif answer.identity != station.identity:
            yield check.failed(
                REACH,
                f"{name} at {address} has another TF_CONFIG, or belongs to "
                "another group",
                _SAME_CONFIG,
            )
        else:
            good.append(name)
    if good:
        yield check.ok(REACH, f"each at its own address: {', '.join(good)}")
    yield from _unheard(cluster, station, good)
    yield from _keys_and_clocks(station, answers)


def _unheard(
    cluster: cluster_lib.Cluster,
    station: station_lib.Station,
    names: Iterable[str],
) -> Iterator[check.Result]:
    for name in names:
        if name not in station.heard:
            yield check.warning(
                REACH,
                f"{name} has answered, and has not asked {cluster.task_name}",
                f"Look at what the doctor says there: {name} may not reach "
                f"{cluster.address}.",
            )


def _keys_and_clocks(
    station: station_lib.Station, answers: Mapping[str, station_lib.Answer]
) -> Iterator[check.Result]:
    for name, answer in sorted(answers.items()):
        what = ""
        if answer.has_key is False:
            what = f"{name} has another key than this task"
        elif answer.keyed and not station.keyed:
            what = f"{name} has a key, and this task has none"
        elif station.keyed and not answer.keyed:
            what = f"this task has a key, and {name} has none"
        if what:
            yield check.failed(
                environment.KEY,
                what,
                f"export {signing.FILE_VARIABLE} with the same key for every "
                "task of every group.",
            )
        if abs(answer.clock_secs) > MAX_CLOCK_SECS:
            yield check.warning(
                CLOCK,
                f"the clock of {name} differs from this one by "
                f"{answer.clock_secs:+.0f} s",
                "Keep the clocks together with NTP (chronyc tracking): logs, "
                "curves and the status are read by them. No decision is.",
            )
