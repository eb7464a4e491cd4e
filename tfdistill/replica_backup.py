"""Takes and restores backups where replicas hold all variables themselves.

The chief chooses the backup, and tells the others; the chief alone writes.
Everything that workers do together is a collective of its own, so that all of
them go on from the same backup or fail with the same message.
"""

import json
import logging
import pathlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill import background
from tfdistill import backup_store
from tfdistill import chief_only
from tfdistill import exchange as exchange_lib
from tfdistill import host_state
from tfdistill import replica_state
from tfdistill import training_state
from tfdistill import worker_values

_log = logging.getLogger(__name__)
_HOST = "host.json"
_NONE = -1


class ReplicaBackup:
    """The backups of one `fit`.

    Attributes:
        point: Where to go on; None for a training that starts anew.
        num_written, num_skipped, num_failed: Backups of this process.
    """

    def __init__(
        self,
        store: backup_store.BackupStore,
        strategy: tf.distribute.Strategy,
        *,
        finish_timeout_secs: float,
    ) -> None:
        """Chooses the backup to go on from; every worker calls it.

        Args:
            store: Where backups lie, the same on all workers.
            strategy: The strategy in use.
            finish_timeout_secs: Longest wait for the last backup to be
                written.

        Raises:
            RuntimeError: A worker cannot read the backup that the chief has
                chosen.
        """
        self._store, self._strategy = store, strategy
        self._workers = worker_values.WorkerValues(strategy)
        self._finish_timeout_secs = finish_timeout_secs
        self._worker: background.OneJobThread | None = None
        self._state: replica_state.ReplicaState | None = None
        self._version: exchange_lib.Version | None = None
        self._values: replica_state.Snapshot | None = None
        self._host: dict[str, Any] = {}
        self.point: training_state.TrainingPoint | None = None
        self.num_written = self.num_skipped = self.num_failed = 0
        self._choose()

    def _choose(self) -> None:
        chosen = _NONE
        failure: Exception | None = None
        if chief_only.is_chief(self._strategy):
            try:
                self._version = self._store.newest()
            except OSError as error:
                failure = error
            if self._version is not None:
                chosen = self._version.step
        self._fail_together(failure)
        chosen = max(self._workers.gathered(chosen))
        if chosen == _NONE:
            return
        try:
            if self._version is None:
                self._version = self._store.open(0, chosen)
            with tf.io.gfile.GFile(f"{self._version.path}/{_HOST}") as file:
                self._host = json.loads(file.read())
        except (RuntimeError, OSError, ValueError, tf.errors.OpError) as error:
            failure = error
        self._fail_together(failure)
        found = self._version.manifest.extras if self._version else {}
        self.point = training_state.TrainingPoint(
            step=chosen,
            epoch=found["epoch"],
            batch=found["batch"],
            data=dict(found["data"]),
        )

    def _fail_together(self, failure: Exception | None) -> None:
        """Raises on all workers if one of them has failed."""
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

    # ---- before the first step ----

    def restore(self, model: Any) -> None:
        """Gives a model that `fit` has prepared the values of the backup.

        Args:
            model: The model.

        Raises:
            ValueError: The backup is of another model or optimizer.
            RuntimeError: A worker cannot read it.
        """
        self._state = replica_state.ReplicaState(model)
        if chief_only.is_chief(self._strategy):
            self._worker = background.OneJobThread(
                "tfdistill-backup", job="backup"
            )
        if self._version is None or self.point is None:
            return
        version, values = self._version, None
        failure: Exception | None = None
        backup_store.check_same(
            version.manifest.variables, self._state.specs(), version.path
        )
        try:
            values = self._state.read(version.path)
        except (tf.errors.OpError, OSError, ValueError) as error:
            failure = error
        self._fail_together(failure)
        if values is None:
            raise RuntimeError("went on without a backup.")
        self._state.assign(values)
        self._values = values
        if chief_only.num_workers(self._strategy) == 1:
            # Workers may have generators of their own.
            host_state.set_random(self._host["random"])
        self._check_replicas()
        self._restore_teachers(model.teachers)
        _log.warning("Resuming from step %d of %s.", version.step, version.path)

    def restore_metrics(self) -> None:
        """Gives the metrics the sums of the epoch in progress, once."""
        values, self._values = self._values, None
        if values is not None and self._state and self.point:
            if self.point.batch:
                self._state.assign_metrics(values)

    def restore_callbacks(
        self, callbacks: Sequence[keras.callbacks.Callback]
    ) -> None:
        """Gives Keras' callbacks what they had counted.

        Args:
            callbacks: Those of `fit`, whose training has begun.
        """
        if self.point and not host_state.set_callbacks(
            callbacks, self._host["callbacks"]
        ):
            _log.warning(
                "`fit` has other callbacks than the backup was made with: "
                "what they count starts anew."
            )

    def _check_replicas(self) -> None:
        before = self._host["replicas"]
        now = int(self._strategy.num_replicas_in_sync)
        if before != now:
            _log.warning(
                "The backup was made with %d replicas, now there are %d: "
                "batch statistics are averaged, random generators and the "
                "epoch's metrics start anew.",
                before,
                now,
            )

    def _restore_teachers(self, teachers: Any) -> None:
        wanted = {int(k): v for k, v in self._host["teachers"].items()}
        if not any(step >= 0 for step in wanted.values()):
            return
        found = teachers.load_versions(wanted)
        for peer, step in sorted(wanted.items()):
            if step >= 0 and found.get(peer) != step:
                _log.warning(
                    "Version %d of group %d, the teacher at the backup, could "
                    "not be loaded: the group is no teacher until its next "
                    "refresh.",
                    step,
                    peer,
                )

    # ---- between steps ----

    def take(
        self,
        model: Any,
        point: training_state.TrainingPoint,
        callbacks: Sequence[keras.callbacks.Callback],
        *,
        wait: bool = False,
    ) -> None:
        """Takes a snapshot, and has it written in the background.

        Every worker calls it at the same step. While one is being written,
        the next is left out.

        Args:
            model: The model.
            point: Where training stands.
            callbacks: Those of `fit`.
            wait: Whether to wait for an earlier one, and for this one.
        """
        if self._state is None:
            raise RuntimeError("took a backup before training began.")
        snapshot = self._state.snapshot()
        if self._worker is None:
            return
        host = {
            "random": host_state.of_random(),
            "callbacks": host_state.of_callbacks(callbacks),
            "teachers": _versions(model.teachers),
            "replicas": int(self._strategy.num_replicas_in_sync),
        }
        limit = self._finish_timeout_secs if wait else 0.0
        submitted = self._worker.submit(
            lambda: self._write(snapshot, point, host), wait_secs=limit
        )
        self.num_skipped += not submitted
        if wait and not self._worker.wait_idle(limit):
            _log.warning(
                "Step %d was not backed up within %.0f s; training goes on.",
                point.step,
                limit,
            )

    def _write(
        self,
        snapshot: replica_state.Snapshot,
        point: training_state.TrainingPoint,
        host: dict[str, Any],
    ) -> None:
        state = self._state
        if state is None:
            raise RuntimeError("wrote a backup before training began.")

        def write(directory: str) -> None:
            state.write(directory, snapshot)
            pathlib.Path(directory, _HOST).write_text(json.dumps(host))

        try:
            self._store.save(
                write,
                step=point.step,
                variables=state.specs(),
                extras={
                    "epoch": point.epoch,
                    "batch": point.batch,
                    "data": dict(point.data),
                },
            )
            self.num_written += 1
        except exchange_lib.VersionExistsError:
            _log.info("Step %d was backed up before.", point.step)
        except exchange_lib.ExportError as error:
            self.num_failed += 1
            _log.warning(
                "Step %d was not backed up, training goes on: %s",
                point.step,
                error,
            )

    def close(self) -> None:
        """Waits for a backup that is being written; ends the thread."""
        if self._worker is not None:
            self._worker.close(self._finish_timeout_secs)
            self._worker = None


def _versions(teachers: Any) -> dict[str, int]:
    return {str(peer): step for peer, step in teachers.versions().items()}
