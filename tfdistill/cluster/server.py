"""What a worker or ps task does in a group with parameter servers: serve.

All computation is sent to such a task by the group's coordinator, its chief.
TensorFlow's server cannot be stopped, and does not notice that its coordinator
has died. So the task looks for the coordinator itself.

If the servers are not restarted together with their coordinator, as on
Kubernetes, `TFDISTILL_CHIEF_RETURN_SECS` makes them wait for its next start:
once it is gone the process restarts itself, since a coordinator's variables
stay on a server until its process ends. A coordinator that is not back in time
is taken for done.
"""

import contextlib
import errno
import os
import sys
import time
from collections.abc import Iterator
from typing import NoReturn

import tensorflow as tf

from tfdistill.cluster import ending
from tfdistill.cluster import identity
from tfdistill.cluster import links
from tfdistill.cluster import rendezvous
from tfdistill.cluster import signs
from tfdistill.system import processes

_PROBE_SECS = 1.0
# A host that refuses has lost its coordinator; one that does not answer may
# be back, until the coordinator itself gives up, by `links`.
_REFUSED_SECS = 3.0
_SILENT_SECS = 12.0
# After how many of them a silent one is named.
_WORD_SECS = 5.0
_RETURN_VARIABLE = "TFDISTILL_CHIEF_RETURN_SECS"
# Set from one life of a server to its next.
_SEEN_VARIABLE = "TFDISTILL_CHIEF_WAS_THERE"


@contextlib.contextmanager
def port_in_use_explained(cluster: identity.Cluster) -> Iterator[None]:
    """Explains the failure to listen on this task's own address.

    A launcher that chose the ports starts the group again on others.
    """
    try:
        yield
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise _failure(cluster, str(error)) from error
    except tf.errors.OpError as error:
        if "Could not start gRPC server" not in error.message:
            raise
        raise _failure(cluster, error.message.strip()) from error


def _failure(cluster: identity.Cluster, cause: str) -> RuntimeError:
    signs.announce(signs.PORT_TAKEN)
    return RuntimeError(
        f"{cluster.task_name} cannot listen on {cluster.address}: {cause}. "
        "Another process probably uses that port, such as a second "
        f"{cluster.task_name}: stop that process, or give each task its own "
        "port in TF_CONFIG."
    )


class Presence:
    """Judges from one probe after the other whether the coordinator is gone.

    Times are seconds of any one clock, passed in.
    """

    def __init__(self, *, limit_secs: float, now: float) -> None:
        """Waits for it for `limit_secs`, or without a limit if that is 0."""
        self.was_seen = False
        self._limit_secs = limit_secs or float("inf")
        self._since = now

    def is_over(self, answer: processes.Answer, *, now: float) -> bool:
        """Takes in one probe; returns whether to stop waiting.

        Waiting ends if the coordinator was seen and has refused for 3 seconds,
        or not answered for 12, or if it never came.
        """
        if answer is processes.Answer.OPEN:
            self.was_seen, self._since = True, now
            return False
        patience = self._limit_secs
        if self.was_seen:
            refuses = answer is processes.Answer.REFUSED
            patience = _REFUSED_SECS if refuses else _SILENT_SECS
        return now - self._since >= patience


def serve(cluster: identity.Cluster, *, limit_secs: float) -> NoReturn:
    """Serves the coordinator until it is gone, then ends the process.

    The exit code is 0 after a coordinator that has gone, and 75 if it was not
    seen in time. SIGTERM ends the process at once, as it does by default. A
    coordinator that is back within seconds, at the same address, is served
    like the one before it; with `TFDISTILL_CHIEF_RETURN_SECS` in the
    environment also one that is back within that time. `limit_secs` of 0 means
    no limit.
    """
    num_gpus = len(tf.config.list_physical_devices("GPU"))
    if cluster.task_type == "worker" and num_gpus > 1:
        raise ValueError(
            "A worker of a group with parameter servers must have at most one "
            f"GPU; {cluster.task_name} received {num_gpus}. Start a worker for "
            "each GPU, each with its own CUDA_VISIBLE_DEVICES."
        )
    return_secs = ending.limit_from_env(_RETURN_VARIABLE, 0.0)
    is_second_life = bool(return_secs and os.environ.get(_SEEN_VARIABLE))
    if is_second_life:
        limit_secs = return_secs
    server, is_ready = _start(cluster), False
    address = cluster.spec["chief"][0]
    coordinator = Presence(limit_secs=limit_secs, now=time.monotonic())
    answer = processes.ask(address)
    limit = f"{limit_secs:g} s at most" if limit_secs else "as long as it takes"
    word_at = now = time.monotonic()
    while not coordinator.is_over(answer, now=now):
        if answer is processes.Answer.OPEN:
            word_at = now + _WORD_SECS
            if not is_ready:
                print(f"tfdistill: {server.target} serves chief:0", flush=True)
                signs.announce(signs.READY)
                _watch_others(cluster)
                is_ready, limit = True, f"{_SILENT_SECS:g} s at most"
        elif now >= word_at:
            word_at = now + rendezvous.AGAIN_SECS
            print(
                f"tfdistill: {cluster.task_name} waits for chief:0 at "
                f"{address}, {limit}. It {answer.value}.",
                file=sys.stderr,
                flush=True,
            )
        for _ in range(2):
            signs.own().say(signs.SERVING)
            time.sleep(_PROBE_SECS / 2)
        answer, now = processes.ask(address), time.monotonic()
    if not coordinator.was_seen:
        ending.leave(
            # It was there before: then it must be done.
            0 if is_second_life else signs.EXIT_RETRY,
            f"{cluster.task_name} waited {limit_secs:g} s for chief:0 at "
            f"{address}, which {answer.value}. Check the chief's log: it may "
            "have ended, as by wrong options, before it was ready. "
            "TFDISTILL_START_TIMEOUT_SECS sets the limit.",
        )
    if not return_secs:
        ending.leave(
            0, f"{cluster.task_name} ends: chief:0 at {address} is gone."
        )
    _restart(
        f"{cluster.task_name} restarts and waits {return_secs:g} s for "
        f"chief:0 at {address}, which is gone."
    )


def _watch_others(cluster: identity.Cluster) -> None:
    """Ends a worker or ps that loses one of the other kind."""
    # Nobody else sees that these two lose each other.
    own = "chief:", f"{cluster.task_type}:"
    links.watch(
        cluster.task_name,
        {
            name: address
            for name, address in cluster.addresses.items()
            if not name.startswith(own)
        },
    )


def _start(cluster: identity.Cluster) -> tf.distribute.Server:
    # Without it calls to a task that has died wait for its return.
    os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")
    config = tf.compat.v1.ConfigProto()
    hosts = [each.rpartition(":")[0] for each in cluster.addresses.values()]
    num_here = hosts.count(str(cluster.address).rpartition(":")[0])
    if num_here > 1 and "TF_NUM_INTRAOP_THREADS" not in os.environ:
        # On 2 cores two ps and two workers trained 90,000 examples a second so,
        # and 85,000 with TensorFlow's default, a thread a core in every task.
        share = (os.cpu_count() or 1) // num_here
        config.intra_op_parallelism_threads = max(1, share)
    if cluster.task_type == "ps":
        config.device_count["GPU"] = 0  # Variables live in host memory.
    with port_in_use_explained(cluster):
        return tf.distribute.Server(
            {job: list(hosts) for job, hosts in cluster.spec.items()},
            job_name=cluster.task_type,
            task_index=cluster.task_index,
            protocol="grpc",
            config=config,
        )


def _restart(message: str) -> NoReturn:
    """Runs this program again in this process, without what it holds."""
    print(f"tfdistill: {message}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os.environ[_SEEN_VARIABLE] = "1"
    for name in os.listdir("/dev/fd"):
        if int(name) > 2:
            # The descriptor that was listed by is closed by now.
            with contextlib.suppress(OSError):
                os.set_inheritable(int(name), False)
    os.execv(sys.executable, sys.orig_argv)
