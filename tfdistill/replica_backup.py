"""Takes and restores backups where replicas hold all variables themselves.

All workers read the same backup; the chief alone writes, in the background.
"""

import json
import logging
import pathlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill import background
from tfdistill import backup_choice
from tfdistill import backup_store
from tfdistill import chief_only
from tfdistill import host_state
from tfdistill import keras_internals
from tfdistill import replica_state
from tfdistill import training_state

_log = logging.getLogger(__name__)


class ReplicaBackup:
    """The backups of one `fit`.

    Attributes:
        num_skipped: Backups left out while one was being written.
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
        self._finish_timeout_secs = finish_timeout_secs
        self._worker: background.OneJobThread | None = None
        self._state: replica_state.ReplicaState | None = None
        self._values: replica_state.Snapshot | None = None
        self._choice = backup_choice.BackupChoice(store, strategy)
        self._chosen = self._choice.choose()
        self.num_skipped = 0

    @property
    def point(self) -> training_state.TrainingPoint | None:
        """Where to go on; None for a training that starts anew."""
        return self._chosen.point if self._chosen else None

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
        if self._chosen is None:
            return
        version, values = self._chosen.version, None
        failure: Exception | None = None
        backup_store.check_same(
            version.manifest.variables, self._state.specs(), version.path
        )
        try:
            values = self._state.read(version.path)
        except (tf.errors.OpError, OSError, ValueError) as error:
            failure = error
        self._choice.fail_together(failure)
        if values is None:
            raise RuntimeError("went on without a backup.")
        self._state.assign(values)
        self._values = values
        if chief_only.num_workers(self._strategy) == 1:
            # Workers may have generators of their own.
            host_state.set_random(self._chosen.host["random"])
        self._check_same_run(self._chosen.host)
        _restore_teachers(model.teachers, self._chosen.host["teachers"])
        _log.warning(
            "Resuming from step %d of %s; reading past %d batches.",
            version.step,
            version.path,
            self._chosen.point.data["batches"],
        )

    def restore_metrics(self) -> None:
        """Gives the metrics the sums of the epoch in progress, once."""
        values, self._values = self._values, None
        if values is None or self._state is None or self.point is None:
            return
        if self.point.batch:
            self._state.assign_metrics(values)

    def restore_callbacks(
        self, callbacks: Sequence[keras.callbacks.Callback]
    ) -> None:
        """Gives Keras' callbacks what they had counted.

        Args:
            callbacks: Those of `fit`, whose training has begun.
        """
        if self._chosen and not host_state.set_callbacks(
            callbacks, self._chosen.host["callbacks"]
        ):
            _log.warning(
                "`fit` has other callbacks than the backup was made with: "
                "what they count starts anew."
            )

    def _check_same_run(self, host: dict[str, Any]) -> None:
        """Warns of what keeps a resumed training from being the same."""
        seed = keras_internals.global_seed()
        if seed is None or seed != host["seed"]:
            _log.warning(
                "The random seed was %s at the backup and is %s now: data "
                "that are shuffled without a seed of their own come in another "
                "order. Call keras.utils.set_random_seed with one seed before "
                "the data set is made.",
                host["seed"],
                seed,
            )
        before = host["replicas"]
        now = int(self._strategy.num_replicas_in_sync)
        if before != now:
            _log.warning(
                "The backup was made with %d replicas, now there are %d: "
                "batch statistics are averaged, random generators and the "
                "epoch's metrics start anew.",
                before,
                now,
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
            "seed": keras_internals.global_seed(),
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
            pathlib.Path(directory, backup_choice.HOST).write_text(
                json.dumps(host)
            )

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

    def close(self) -> None:
        """Waits for a backup that is being written; ends the thread."""
        if self._worker is not None:
            self._worker.close(self._finish_timeout_secs)
            self._worker = None


def _versions(teachers: Any) -> dict[str, int]:
    return {str(peer): step for peer, step in teachers.versions().items()}


def _restore_teachers(teachers: Any, versions: dict[str, int]) -> None:
    wanted = {int(peer): step for peer, step in versions.items()}
    if not any(step >= 0 for step in wanted.values()):
        return
    found = teachers.load_versions(wanted)
    for peer, step in sorted(wanted.items()):
        if step >= 0 and found.get(peer) != step:
            _log.warning(
                "Version %d of group %d, the teacher at the backup, could not "
                "be loaded: the group is no teacher until its next refresh.",
                step,
                peer,
            )
