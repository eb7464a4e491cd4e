"""Says in plain words, and to the launcher, that an address is taken."""

import contextlib
import errno
from collections.abc import Iterator

import tensorflow as tf

from tfdistill import cluster as cluster_lib
from tfdistill import startup


@contextlib.contextmanager
def in_use_is_told(cluster: cluster_lib.Cluster) -> Iterator[None]:
    """Explains the failure to listen on this task's own address.

    A launcher that chose the ports starts the group again on others.

    Args:
        cluster: This task.

    Raises:
        RuntimeError: The task cannot listen on its address.
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


def _failure(cluster: cluster_lib.Cluster, cause: str) -> RuntimeError:
    startup.announce_port_taken()
    return RuntimeError(
        f"{cluster.task_name} cannot listen on {cluster.address}: {cause}. "
        "Most likely another process listens there, such as a second "
        f"{cluster.task_name}: end it, or give each task a port of its own in "
        "TF_CONFIG."
    )
