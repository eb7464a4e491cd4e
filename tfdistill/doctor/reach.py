"""Can this task listen at its address, and do the tasks of its group meet?

They meet at each task's address, as workers meet at the chief's before they
train: TensorFlow's own words for two swapped addresses are a start that never
ends.
"""

import concurrent.futures
import socket
from collections.abc import Iterator

from tfdistill.cluster import identity
from tfdistill.cluster import rendezvous
from tfdistill.doctor import check

ADDRESS = "address"
REACH = "reach"


def examine(
    cluster: identity.Cluster, *, wait_secs: float
) -> Iterator[check.Result]:
    """Checks this task's own address, and those of its group."""
    if cluster.address is None:
        yield check.skipped(ADDRESS, "one task, without TF_CONFIG")
        return
    port = int(cluster.address.rpartition(":")[2])
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        yield check.failed(
            ADDRESS,
            f"{cluster.task_name} cannot listen on port {port}: "
            f"{error.strerror}",
            f"Find who holds it with `ss -ltnp 'sport = :{port}'` and end it, "
            "such as a task of an earlier run; or give the task another port, "
            "from 1024 up, in every task's TF_CONFIG. The doctor runs before "
            "the tasks, not beside them.",
        )
        return
    yield check.ok(ADDRESS, f"port {port} is free")
    if len(cluster.addresses) == 1:
        yield check.skipped(REACH, "one task: nobody to reach")
    else:
        yield from _meet_at_each_address(cluster, wait_secs)


def _meet_at_each_address(
    cluster: identity.Cluster, wait_secs: float
) -> Iterator[check.Result]:
    addresses = cluster.addresses
    good = []
    with concurrent.futures.ThreadPoolExecutor(len(addresses)) as pool:
        meetings = {
            host: pool.submit(
                rendezvous.meet,
                cluster,
                host=host,
                together=False,
                limit_secs=wait_secs,
            )
            for host in addresses
        }
        for host, meeting in meetings.items():
            try:
                meeting.result()
                good.append(host)
            except rendezvous.MissingWorkersError as error:
                yield check.failed(
                    REACH,
                    str(error),
                    "Run the doctor there at the same time (--wait_secs says "
                    "how long this one waits); if it does run, open its port "
                    f"in the firewall, or correct {addresses[host]} in "
                    "TF_CONFIG.",
                )
            except rendezvous.RefusedError as error:
                yield check.failed(
                    REACH,
                    str(error),
                    "Give all tasks of a group the same cluster in TF_CONFIG, "
                    "in the same order, the same TFDISTILL_GROUP and "
                    "TFDISTILL_NUM_GROUPS, and each its own index.",
                )
    if good:
        yield check.ok(REACH, f"all others met at {', '.join(good)}")
