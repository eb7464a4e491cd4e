"""Why do the peers of a run that send predictions not teach?

Reads what the groups have logged, and the addresses that their workers have
left in the exchange. Nobody is asked but for a connection.
"""

import collections
import os
import socket
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

from tfdistill.cluster import identity
from tfdistill.doctor import check
from tfdistill.exchange import reader
from tfdistill.status import group as group_status
from tfdistill.status import observed_run
from tfdistill.system import processes

NAME = "predictions"
_MAX_WORKERS = 1000
_CONNECT_SECS = 3.0
_SAME_SIZE = "Use equally many workers and replicas in all groups."
_START = (
    "Start all groups with the same exchange, key and "
    'TeacherSet(by="predictions") (codistillation.by=predictions), and look '
    "whether that group trains (tfdistill-status)."
)
_FIREWALL = (
    "Let the workers of all groups connect to each other at any port: each "
    "mailbox has one that its system chooses. The host must be known by the "
    "same name on all machines."
)
_MISSED = (
    "Raise wait_secs (codistillation.wait_secs) above the difference between "
    "two groups' steps, and let the groups start together "
    "(tfdistill.StartTogether, start_together_secs). A group that was "
    "restarted catches up only while the others wait for it."
)
_OF_REFUSED = {
    "batch": "Give all groups the same batches: data.mode=coordinated, and the "
    "same seeds of shuffling and random augmentation.",
    "classes": "Give all groups the same student and the same classes.",
    "dtype": "Give all groups the same student, dtype policy and `form`.",
    "shape": "Give all groups the same student and the same `form`.",
    "finite": "That group has diverged: look at its loss, and lower its "
    "learning rate.",
    "replica": _SAME_SIZE,
    "step": "Look who else has the run's key: a peer's steps never go back.",
}
_FORGED = (
    "Give all groups of the run the same TFDISTILL_EXCHANGE_KEY_FILE. If they "
    "have it, somebody else sends messages: close these ports to strangers."
)

Connect = Callable[[tuple[str, int]], Any]


def _connect(address: tuple[str, int]) -> None:
    socket.create_connection(address, timeout=_CONNECT_SECS).close()


def before(cluster: identity.Cluster) -> check.Result:
    """Says whether peers can send predictions to a group, before its start."""
    if cluster.uses_parameter_servers:
        return check.failed(
            NAME,
            "workers of a group with parameter servers are at different steps, "
            "and cannot learn from predictions of peers",
            "Run it without parameter servers (--ps_per_group=0), or by "
            "versions (codistillation.by=versions).",
        )
    return check.skipped(
        NAME,
        "peers send predictions, and no version is loaded; once the groups "
        "train, --workdir=DIR shows whether they arrive",
    )


def examine(
    workdir: str | os.PathLike[str],
    *,
    groups: Collection[int] | None = None,
    connect: Connect = _connect,
) -> Iterator[check.Result]:
    """Examines a run, alive or over; nothing if it has no such peers.

    Of the `groups` that learn; default: of all.
    """
    try:
        run = observed_run.ObservedRun(workdir)
        found = run.look()
    except observed_run.NoRunError:
        return
    learning = [
        status
        for status in found.groups
        if (groups is None or status.group in groups)
        and any(peer.num_answers is not None for peer in status.teachers)
    ]
    steps = {status.group: status.number("step") for status in found.groups}
    for status in learning:
        faults = [
            fault
            for peer in status.teachers
            if peer.num_answers is not None
            for fault in _of_peer(status, peer, steps)
        ]
        yield from faults
        if not faults:
            yield check.ok(NAME, f"group {status.group}: {_counts(status)}")
    if not learning:
        return
    notes = {
        status.group: dict(_mailboxes(run.exchange, status.group))
        for status in found.groups
    }
    yield from _sizes(notes)
    alive = {s.group for s in found.groups if s.state == "running"}
    yield from _reachable(
        {g: boxes for g, boxes in notes.items() if g in alive}, connect
    )


def _counts(status: group_status.GroupStatus) -> str:
    return ", ".join(
        f"{peer.name} answered {peer.num_answers} of {peer.num_asked} batches"
        for peer in status.teachers
        if peer.num_answers is not None
    )


def _of_peer(
    status: group_status.GroupStatus,
    peer: group_status.TeacherStatus,
    steps: Mapping[int, float | None],
) -> Iterator[check.Result]:
    who = f"group {status.group}"
    where = "at steps " + " and ".join(
        f"{steps.get(group) or 0:.0f}"
        for group in (status.group, -1 if peer.group is None else peer.group)
    )
    missed, asked = peer.num_missed or 0, peer.num_asked
    if peer.misses_many and not peer.num_answers:
        why = f": {peer.reason}" if peer.reason else ""
        yield check.failed(
            NAME,
            f"{who} has had no predictions of {peer.name} in {asked} "
            f"batches, {where}{why}",
            _remedy(peer),
        )
    elif peer.misses_many:
        yield check.warning(
            NAME,
            f"{who} did without predictions of {peer.name} in {missed} of "
            f"{asked} batches ({missed / asked:.0%}), {where}",
            _remedy(peer) if peer.refused else _MISSED,
        )
    for kind, count in peer.refused.items():
        reasons = peer.quarantined if len(peer.refused) == 1 else {}
        last = f"; the last: {reasons[max(reasons)]}" if reasons else ""
        yield check.warning(
            NAME,
            f"{who} has refused {count} messages of {peer.name} ({kind}){last}",
            _OF_REFUSED.get(kind, _START),
        )
    if peer.num_forged:
        yield check.warning(
            NAME,
            f"{who} has refused {peer.num_forged} messages or streams of "
            "somebody who is no peer with the run's key",
            _FORGED,
        )


def _remedy(peer: group_status.TeacherStatus) -> str:
    if peer.refused:
        kind = max(peer.refused, key=lambda kind: peer.refused[kind])
        return _OF_REFUSED.get(kind, _START)
    if "equally many" in peer.reason:
        return _SAME_SIZE
    if "does not take messages" in peer.reason:
        return f"{_FIREWALL} {_START}"
    # Messages come, but of other steps.
    return _MISSED if "last answer" in peer.reason else _START


def _mailboxes(
    exchange: str, group: int
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yields the notes of a group's workers, whoever has signed them."""
    notes = reader.VersionReader(exchange, key=None).notes(group)
    for worker in range(_MAX_WORKERS):
        try:
            note = notes.read(f"mailbox-{worker}")
        except OSError:
            return
        if note is None:
            return
        yield worker, note


def _sizes(
    notes: Mapping[int, Mapping[int, Mapping[str, Any]]],
) -> Iterator[check.Result]:
    """Compares how many workers and replicas the groups have."""
    sizes = collections.defaultdict(list)
    for group, boxes in notes.items():
        replicas = [str(boxes[worker].get("replicas")) for worker in boxes]
        if replicas:
            sizes[tuple(replicas)].append(group)
    if len(sizes) > 1:
        seen = "; ".join(
            f"group {', '.join(map(str, groups))}: {len(replicas)} workers "
            f"with the replicas {' '.join(replicas)}"
            for replicas, groups in sizes.items()
        )
        yield check.failed(
            NAME,
            f"the groups have other workers or replicas: {seen}",
            f"{_SAME_SIZE} If they have, start in an empty exchange: these "
            "are addresses of an earlier run.",
        )


def _reachable(
    notes: Mapping[int, Mapping[int, Mapping[str, Any]]], connect: Connect
) -> Iterator[check.Result]:
    """Connects to each worker that waits for messages."""
    good = []
    for group, boxes in notes.items():
        for worker, note in boxes.items():
            host, port = str(note.get("host"))[:255], note.get("port")
            if type(port) is not int or not 0 < port < 2**16:
                continue
            if note.get("machine") == processes.machine():
                host = "127.0.0.1"
            try:
                connect((host, port))
            except OSError as error:
                yield check.failed(
                    NAME,
                    f"worker {worker} of group {group} waits for messages at "
                    f"{host}:{port}, which cannot be reached from here: "
                    f"{error}",
                    _FIREWALL,
                )
            else:
                good.append(f"{host}:{port}")
    if good:
        yield check.ok(NAME, f"mailboxes can be reached: {', '.join(good)}")
