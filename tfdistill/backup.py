"""Backups of a training on parameter servers, and going on from the last."""

import logging
import os
from typing import Any

from tfdistill import exchange as exchange_lib
from tfdistill import parameter_server
from tfdistill import step_counter
from tfdistill import training_state

_log = logging.getLogger(__name__)
_PREFIX = "state"


class Backup(step_counter.SteppedCallback):
    """Backs the training up, and resumes from the newest whole backup.

    A backup is taken between two steps, with none in flight, so it is exact
    to its step. It is put together out of sight, checksummed, and becomes
    visible by one rename; the one before is kept, and used where the newest
    is damaged. `fit` with the same arguments goes on from there: with the
    step, the epoch and the metrics as they were. The data start anew.

    For parameter servers. Each of them writes its own rows: all tasks of the
    group must see the directory.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every_steps: int | None = None,
        max_to_keep: int = 2,
    ) -> None:
        """Touches no storage.

        Args:
            directory: Where backups lie; this group's own.
            every_steps: Steps between backups, >= 1. Default: one at the end
                of each epoch.
            max_to_keep: Number of backups to keep, >= 2.
        """
        super().__init__()
        self._backups = exchange_lib.Exchange(
            directory,
            max_to_keep=max_to_keep,
            min_keep_secs=0.0,
            # The group's own files outlive the run and its key.
            key=None,
        )
        self._schedule = (
            None
            if every_steps is None
            else step_counter.EverySteps(every_steps)
        )
        # Whether training should let what is in flight end, for `on_quiet`.
        self.wants_quiet = False
        self.num_backups = 0

    def restore(
        self, state: training_state.TrainingState
    ) -> training_state.TrainingPoint | None:
        """Reads the newest whole backup, before training starts.

        Args:
            state: What to read it into.

        Returns:
            Where to go on, or None where there is no backup.

        Raises:
            ValueError: The backup is of another model or optimizer.
        """
        for step in reversed(self._backups.steps(0)):
            try:
                version = self._backups.open(0, step)
                self._backups.verify(version)
            except exchange_lib.CorruptVersionError as error:
                _log.warning("Trying the backup before: %s", error)
                continue
            _check_same(version.manifest.variables, state.specs(), version.path)
            state.read(f"{version.path}/{_PREFIX}")
            found = version.manifest.extras
            _log.warning("Resuming from step %d of %s.", step, version.path)
            return training_state.TrainingPoint(
                step=step,
                epoch=found["epoch"],
                batch=found["batch"],
                metric_sums=tuple(found["metric_sums"]),
            )
        return None

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts to count the steps."""
        super().on_train_begin(logs)
        if not parameter_server.is_used(self.model.distribute_strategy):
            raise ValueError(
                "tfdistill.Backup works with parameter servers; received a "
                "model without. Use keras.callbacks.ModelCheckpoint there."
            )
        self.wants_quiet = False
        if self._schedule:
            self._schedule.start(self.step)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Asks for quiet when a backup is due."""
        super().on_train_batch_end(batch, logs)
        if self._schedule and self._schedule.due(self.step):
            self.wants_quiet = True

    def on_quiet(
        self,
        point: training_state.TrainingPoint,
        state: training_state.TrainingState,
    ) -> None:
        """Writes a backup; a failure is logged, and training goes on.

        Args:
            point: Where training stands.
            state: What to write.
        """
        self.wants_quiet = False
        extras = {
            "epoch": point.epoch,
            "batch": point.batch,
            "metric_sums": list(point.metric_sums),
        }
        try:
            self._backups.publish(
                lambda directory: state.write(f"{directory}/{_PREFIX}"),
                group=0,
                step=point.step,
                variables=state.specs(),
                extras=extras,
            )
            self.num_backups += 1
        except exchange_lib.VersionExistsError:
            _log.info("Step %d was backed up before.", point.step)
        except exchange_lib.ExportError as error:
            _log.warning(
                "Step %d was not backed up, training goes on: %s",
                point.step,
                error,
            )

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Asks for quiet where there is a backup for each epoch."""
        self.wants_quiet = self.wants_quiet or self._schedule is None


def _check_same(theirs: Any, ours: Any, path: str) -> None:
    found = {key: dict(entry) for key, entry in theirs.items()}
    if found == ours:
        return
    keys = sorted(found.keys() ^ ours.keys()) or [
        key for key in sorted(ours) if found[key] != ours[key]
    ]
    raise ValueError(
        f"The backup {path} must be of this model and optimizer; received one "
        f"that differs in {keys[:5]}. Give another directory, or the model as "
        "it was."
    )
