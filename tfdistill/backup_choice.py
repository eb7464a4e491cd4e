"""The backup from which all workers of a group go on, or none of them.

The chief chooses and tells the others by a collective. So does each worker
that fails, that none is left waiting for it.
"""

import dataclasses
import json
from typing import Any

import tensorflow as tf

from tfdistill import backup_store
from tfdistill import chief_only
from tfdistill import exchange as exchange_lib
from tfdistill import training_state
from tfdistill import worker_values

# What is no variable, as JSON.
HOST = "host.json"
_NONE = -1


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A backup to go on from.

    Attributes:
        version: Where it is.
        point: Where training stood.
        host: What was in Python.
    """

    version: exchange_lib.Version
    point: training_state.TrainingPoint
    host: dict[str, Any]


class BackupChoice:
    """Lets a group agree on a backup; all workers call at one point."""

    def __init__(
        self, store: backup_store.BackupStore, strategy: tf.distribute.Strategy
    ) -> None:
        """Reads nothing yet.

        Args:
            store: Where backups lie, the same on all workers.
            strategy: The strategy in use.
        """
        self._store, self._strategy = store, strategy
        self._workers = worker_values.WorkerValues(strategy)

    def choose(self) -> Chosen | None:
        """Returns the newest whole backup, the same on all workers.

        Returns:
            The backup, or None where there is none.

        Raises:
            RuntimeError: A worker cannot read the one that the chief has
                chosen.
        """
        version: exchange_lib.Version | None = None
        failure: Exception | None = None
        if chief_only.is_chief(self._strategy):
            try:
                version = self._store.newest()
            except OSError as error:
                failure = error
        self.fail_together(failure)
        step = max(self._workers.gathered(version.step if version else _NONE))
        if step == _NONE:
            return None
        chosen = None
        try:
            chosen = _read(version or self._store.open(0, step))
        except (
            KeyError,
            OSError,
            RuntimeError,
            ValueError,
            tf.errors.OpError,
        ) as error:
            failure = error
        self.fail_together(failure)
        return chosen

    def fail_together(self, failure: Exception | None) -> None:
        """Raises on all workers if one of them has failed.

        Args:
            failure: What went wrong on this worker, or None.

        Raises:
            RuntimeError: A worker has failed.
        """
        failed = self._workers.gathered(failure is not None)
        if failure is not None:
            raise RuntimeError(
                f"The backups in {self._store.root} must be readable on every "
                f"worker; received {type(failure).__name__}: {failure}. Give "
                "a directory that all of them see."
            ) from failure
        if any(failed):
            replicas = [i for i, is_bad in enumerate(failed) if is_bad]
            raise RuntimeError(
                f"The workers of the replicas {replicas} could not read the "
                f"backup in {self._store.root}; their logs say why."
            )


def _read(version: exchange_lib.Version) -> Chosen:
    with tf.io.gfile.GFile(f"{version.path}/{HOST}") as file:
        host = json.loads(file.read())
    found = version.manifest.extras
    point = training_state.TrainingPoint(
        step=version.step,
        epoch=found["epoch"],
        batch=found["batch"],
        data=dict(found["data"]),
    )
    return Chosen(version, point, host)
