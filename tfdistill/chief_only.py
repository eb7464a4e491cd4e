"""Which task writes files: the chief of the group, and nobody else."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill import keras_internals

_NAMES = (
    "CSVLogger",
    "ModelCheckpoint",
    "OrbaxCheckpoint",  # Not in every Keras.
    "RemoteMonitor",
    "TensorBoard",
)
WRITERS = tuple(
    getattr(keras.callbacks, name)
    for name in _NAMES
    if hasattr(keras.callbacks, name)
)


def is_chief(strategy: tf.distribute.Strategy | None = None) -> bool:
    """Whether this task writes its group's files.

    Args:
        strategy: The strategy in use. Defaults to the current one.

    Returns:
        True on the chief (worker 0 where the cluster names no chief), and
        wherever there is only one task.
    """
    strategy = strategy or tf.distribute.get_strategy()
    resolver = strategy.cluster_resolver
    if resolver is None or not resolver.task_type:
        return True
    if resolver.task_type == "chief":
        return True
    has_chief = "chief" in resolver.cluster_spec().jobs
    return (
        resolver.task_type == "worker"
        and resolver.task_id == 0
        and not has_chief
    )


def num_workers(strategy: tf.distribute.Strategy) -> int:
    """Number of tasks that train together under `strategy`.

    Args:
        strategy: The strategy in use.

    Returns:
        1 where one process trains: the strategy spans no other, or the
        coordinator directs the workers of a parameter-server cluster.
    """
    jobs = keras_internals.jobs_of(strategy)
    if "ps" in jobs:
        return 1
    return max(1, sum(len(jobs.get(job, ())) for job in ("chief", "worker")))


def select(
    callbacks: Any, strategy: tf.distribute.Strategy
) -> list[keras.callbacks.Callback]:
    """Keeps the callbacks that this task runs.

    Callbacks that write files (`ModelCheckpoint`, `OrbaxCheckpoint`,
    `TensorBoard`, `CSVLogger`, `RemoteMonitor`, their subclasses, and any whose
    attribute `chief_only` is true) stay on the chief; all others run on every
    worker, since they may change the training.

    Args:
        callbacks: What `fit` was given.
        strategy: The strategy in use.

    Returns:
        The callbacks of this task, in order.

    Raises:
        ValueError: `BackupAndRestore` on several workers: it restores one
            worker and leaves the others behind.
    """
    if callbacks is None:
        return []
    if isinstance(callbacks, keras.callbacks.CallbackList):
        if num_workers(strategy) == 1:
            return callbacks
        raise ValueError(
            "`callbacks` must be a list of callbacks on several workers, so "
            "that files are written by one of them; received a CallbackList."
        )
    if not isinstance(callbacks, Sequence):
        callbacks = [callbacks]
    if num_workers(strategy) == 1:
        return list(callbacks)
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise ValueError(
                "keras.callbacks.BackupAndRestore does not work on several "
                "workers: each would overwrite the others' files and only one "
                "would be restored. Use tfdistill.Backup, which does."
            )
    if is_chief(strategy):
        return list(callbacks)
    return [c for c in callbacks if not _writes_files(c)]


def _writes_files(callback: keras.callbacks.Callback) -> bool:
    return isinstance(callback, WRITERS) or getattr(
        callback, "chief_only", False
    )
