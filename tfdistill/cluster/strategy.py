"""The one place that turns a `Cluster` into a `tf.distribute` strategy."""

import atexit
import faulthandler
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdistill.cluster import ending
from tfdistill.cluster import identity
from tfdistill.cluster import rendezvous
from tfdistill.cluster import replicas
from tfdistill.cluster import server
from tfdistill.cluster import signs
from tfdistill.system import keras_internals
from tfdistill.system import lossy_output

_EXIT_LIMIT_SECS = 60.0
_LEAVE_SECS = 1800.0
# Which task each strategy was made for: no one asks the environment again.
_CLUSTERS: weakref.WeakKeyDictionary[
    tf.distribute.Strategy, identity.Cluster
] = weakref.WeakKeyDictionary()


def make_strategy(
    cluster: identity.Cluster | None = None,
) -> tf.distribute.Strategy:
    """Creates the strategy that a task trains with.

    Call it before any other TensorFlow operation: collectives can only be set
    up at program start. One task trains on its one device or mirrors over its
    devices; several workers train under `MultiWorkerMirroredStrategy`, and
    this call returns once all of them are there, with the random numbers of the
    first one (Python, NumPy, TensorFlow), so that data which are shuffled
    without a seed are shuffled alike. With parameter servers the
    chief trains under `ParameterServerStrategy`. On a worker or ps this call
    does not return: it serves the chief, and ends the process once the chief
    has gone. All tasks can therefore run the same program.

    A task whose others have not come within `TFDISTILL_START_TIMEOUT_SECS` (300
    by default, 0 for no limit) names those that are missing, and ends.

    Args:
        cluster: This task and its group. Defaults to `Cluster.from_env()`.

    Returns:
        The default strategy, a `MirroredStrategy`, a
        `MultiWorkerMirroredStrategy` or a `ParameterServerStrategy`.

    Raises:
        ValueError: The cluster has parameter servers, and a worker has
            several GPUs; or there are several groups and no exchange.
        RuntimeError: TensorFlow was used before; or the chief refused this
            task, because another task has its name or their TF_CONFIGs
            differ; or another process listens on this task's address.
        SystemExit: With code 75, if another task did not start in time.
    """
    cluster = cluster or identity.Cluster.from_env()
    if cluster.num_groups > 1 and cluster.exchange is None:
        raise identity.error(
            "`exchange` (TFDISTILL_EXCHANGE)",
            f"be set in a run of {cluster.num_groups} groups; without it, each "
            "group would train alone",
            cluster.exchange,
            "Export TFDISTILL_EXCHANGE or TFDISTILL_WORKDIR, a directory or "
            "URL that all groups can reach, for each task.",
        )
    limit_secs = ending.limit_from_env("TFDISTILL_START_TIMEOUT_SECS", 300.0)
    keras_internals.prepare()
    if signs.own().is_heard:  # Its output is a log in the workdir.
        lossy_output.install()
    signs.announce(signs.STARTING)
    if cluster.uses_parameter_servers and not cluster.is_chief:
        server.serve(cluster, limit_secs=limit_secs)
    ending.install()  # For the wait for the others.
    with server.port_in_use_explained(cluster):
        if cluster.uses_parameter_servers:
            strategy = _parameter_servers(cluster, limit_secs)
        elif cluster.num_workers > 1:
            strategy = _multi_worker(cluster, limit_secs)
        else:
            strategy = _one_task()
    ending.install()  # TensorFlow may have put its own handler there.
    signs.announce(signs.READY)
    _CLUSTERS[strategy] = cluster
    chosen = cluster.method
    seed = None if chosen is None else chosen.group_seed(cluster.group)
    if seed is not None:
        keras.utils.set_random_seed(seed)
    return strategy


def cluster_of(strategy: tf.distribute.Strategy) -> identity.Cluster:
    """Returns the cluster that `make_strategy` made a strategy for.

    Any other strategy says nothing of groups: then the environment does.
    """
    return _CLUSTERS.get(strategy) or identity.Cluster.from_env()


def current_cluster() -> identity.Cluster:
    """Returns the cluster of the strategy in whose scope it is called."""
    return cluster_of(tf.distribute.get_strategy())


def compared_steps(every_steps: int | str) -> Any:
    """Returns the steps between exports: a comparison's, or those given."""
    chosen = current_cluster().method
    return (chosen and chosen.every_steps) or every_steps


def is_made(strategy: tf.distribute.Strategy) -> bool:
    """Whether `make_strategy` made it, and so set the seed of a comparison."""
    return strategy in _CLUSTERS


def _one_task() -> tf.distribute.Strategy:
    # Devices are counted without TensorFlow's runtime, which a script may yet
    # have to configure, as by `tf.config.threading`.
    physical: list[Any] = []
    for kind in ("GPU", "CPU"):
        physical = physical or tf.config.get_visible_devices(kind)
    parts = map(tf.config.get_logical_device_configuration, physical)
    if sum(len(part or [None]) for part in parts) <= 1:
        return tf.distribute.get_strategy()
    devices = tf.config.list_logical_devices(physical[0].device_type)
    return tf.distribute.MirroredStrategy([d.name for d in devices])


def _or_end(wait: Callable[[], None]) -> None:
    """Ends this task with the code for a retry if others do not come."""
    try:
        wait()
    except rendezvous.MissingWorkersError as error:
        print(
            f"tfdistill: {error} Check the logs of the missing tasks; "
            "TFDISTILL_START_TIMEOUT_SECS sets the limit.",
            file=sys.stderr,
        )
        raise SystemExit(signs.EXIT_RETRY) from error


def _resolver(
    cluster: identity.Cluster,
) -> tf.distribute.cluster_resolver.ClusterResolver:
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({k: list(v) for k, v in cluster.spec.items()}),
        task_type=cluster.task_type,
        task_id=cluster.task_index,
    )


def _parameter_servers(
    cluster: identity.Cluster, limit_secs: float
) -> tf.distribute.Strategy:
    # Without it calls to a task that has died wait for its return.
    os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")
    _or_end(lambda: rendezvous.await_servers(cluster, limit_secs=limit_secs))
    # TensorFlow waits without a limit for one that has died since, and holds
    # Python's lock, which this timer does not need.
    if limit_secs:
        faulthandler.dump_traceback_later(limit_secs, exit=True)
    resolver = _resolver(cluster)
    resolver.rpc_layer = "grpc"
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    faulthandler.cancel_dump_traceback_later()
    atexit.register(_leave, strategy)
    return strategy


def _leave(strategy: tf.distribute.Strategy) -> None:
    """Lets the chief end although servers are dead or hang.

    The coordinator ends itself, when it is deleted, under a lock that is held
    for as long as a worker is dead. So it is kept, by `strategy`, until all
    ends anyway. What TensorFlow removes from servers then is waited for with
    Python's lock held.
    """
    tf.distribute.coordinator.ClusterCoordinator.__del__ = lambda self: None
    faulthandler.dump_traceback_later(_EXIT_LIMIT_SECS, exit=True)


def _multi_worker(
    cluster: identity.Cluster, limit_secs: float
) -> tf.distribute.Strategy:
    _or_end(lambda: rendezvous.meet(cluster, limit_secs=limit_secs))
    try:
        strategy = tf.distribute.MultiWorkerMirroredStrategy(
            cluster_resolver=_resolver(cluster)
        )
    except RuntimeError as error:
        if "program startup" not in str(error):
            raise
        raise RuntimeError(
            "make_strategy must come before any other use of TensorFlow in the "
            f"program of {cluster.task_name}: before you create tensors, "
            "variables or models, or list devices. Move it to the top of your "
            "program."
        ) from error
    replicas.prepare_to_meet(strategy)
    _leave_together(strategy)
    return strategy


def _leave_together(strategy: tf.distribute.Strategy) -> None:
    """Lets no worker leave while another is still at work.

    A worker that is done before the chief takes the chief down with it
    (tf#58434): its exit looks like a lost peer. At a normal exit all workers
    wait for each other, for half an hour at most; after an error none does.
    """
    failed = threading.Event()
    previous = sys.excepthook

    def note_failure(
        kind: type[BaseException],
        error: BaseException,
        trace: types.TracebackType | None,
    ) -> None:
        failed.set()
        previous(kind, error, trace)
        # All workers see the failure of a collective, or of a joint step.
        heard = tf.errors.OpError | replicas.NotTogetherError
        if not isinstance(error, heard):
            keras_internals.tell_cluster(f"{kind.__name__}: {error}")

    def meet() -> None:
        try:
            replicas.meet(strategy, "leave")
        except replicas.NotTogetherError:
            pass  # The others tell of it.
        except tf.errors.OpError as error:
            print(
                "tfdistill: another worker ended before this worker was done: "
                f"{error.message.splitlines()[0]}",
                file=sys.stderr,
            )

    def wait() -> None:
        if not failed.is_set():
            # In its own thread, so that a peer that will never come cannot
            # hold up the exit.
            waiting = threading.Thread(target=meet, daemon=True)
            waiting.start()
            waiting.join(_LEAVE_SECS)

    sys.excepthook = note_failure
    atexit.register(wait)
