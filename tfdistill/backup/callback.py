"""The backup callback, where `fit` resumes, and a last backup on SIGTERM."""

import contextlib
import logging
import os
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras

from tfdistill import data
from tfdistill.backup import interval
from tfdistill.backup import replicas
from tfdistill.backup import store
from tfdistill.cluster import ending
from tfdistill.cluster import replicas as replicas_lib
from tfdistill.system import fits
from tfdistill.system import keras_internals
from tfdistill.training import steps

Logs = steps.Logs
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def session(model: keras.Model, arguments: dict[str, Any]) -> Iterator[None]:
    """Makes one call of `fit` resume from, and write to, its `Backup`.

    Its `arguments` are adjusted: where to begin, and what must run before and
    after all other callbacks. If SIGTERM arrives while one process trains, or a
    coordinator does, a last backup is tried. Several workers would first have
    to agree on a step: they end at once, and resume from the previous backup.
    """
    callbacks = arguments["callbacks"]
    backups = [c for c in callbacks if isinstance(c, Backup)]
    if not backups:
        yield
        return
    if len(backups) > 1:
        raise ValueError(
            "`callbacks` must hold one tfdistill.callbacks.Backup; received "
            f"{len(backups)}. A larger `max_to_keep` keeps more backups."
        )
    (backup,) = backups
    _check_optimizers(model)
    strategy = model.distribute_strategy
    with contextlib.ExitStack() as stack:
        stack.callback(backup.end_fit)
        others = [c for c in callbacks if c is not backup]
        # Keras' own would come last: a backup would lack the epoch's row.
        if not any(isinstance(c, keras.callbacks.History) for c in others):
            others.append(keras.callbacks.History())
        backup.begin_fit(model, others)
        if backup.point is not None:
            arguments["initial_epoch"] = backup.point.epoch
        callbacks = [backup.begun, *others, backup]
        if not replicas_lib.on_servers(strategy):
            _check_order(arguments)
        if replicas_lib.num_workers(strategy) == 1:
            ending.install(always=True)
            stack.enter_context(ending.deferred())
        arguments["callbacks"] = callbacks
        model.trainer.backup = backup
        stack.callback(setattr, model.trainer, "backup", None)
        yield


def _check_optimizers(model: keras.Model) -> None:
    """Refuses optimizers whose state and steps no backup would hold."""
    found = keras_internals.optimizers_of(model.model)
    more = [n for n, value in found.items() if value is not model.optimizer]
    if more:
        raise ValueError(
            "A model that a callbacks.Backup resumes must have only the "
            "optimizer of Keras' `compile`, whose steps number the backups; it "
            f"also has {', '.join(sorted(more))}. Leave out the Backup, and "
            "save weights with keras.callbacks.ModelCheckpoint."
        )


def _check_order(arguments: Mapping[str, Any]) -> None:
    """Warns of batches that come in another order after a resume."""
    data = arguments.get("x")
    is_python = isinstance(data, keras.utils.PyDataset)
    if is_python and arguments.get("shuffle", True):
        _log.warning(
            "After a resume, Keras shuffles the batches of a PyDataset again: "
            "in the current epoch, some batches come twice and others not at "
            "all. Pass shuffle=False to `fit`, and shuffle in the PyDataset "
            "with a seed."
        )


class Backup(steps.SteppedCallback):
    """Backs the training up, and resumes from the newest complete backup.

    `fit` with the same arguments resumes from it, on one or several workers
    that share the directory. The step, the epoch, the metrics and the place
    in the data are as they were, and training ends with the same weights as
    if it had never stopped. A backup is written out of sight, checksummed,
    and made visible by one rename. The previous one is kept, and used if the
    newest is damaged. docs/resume.md says what is saved, what is not, and
    what it costs.

    A script may call `fit` several times with one directory. The second `fit`
    of a process begins with the model as it is, and has its backups in `fit_2`
    there. Only the model of a `fit` that failed resumes it. After a restart,
    the first one returns at once with the weights of its last backup, and the
    second one resumes.

    With parameter servers, each server writes its own rows while no step is
    in flight. All tasks must therefore see the directory, and after a resume
    the data start again. Otherwise the chief writes, in the background.

    Attributes:
        resumed_step: The step from which the last `fit` resumed; None if
            there was no backup of it.
        num_skipped: Backups left out while one was being written, once `fit`
            is done.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every_steps: int | None = None,
        max_to_keep: int = 2,
        warm_start: str | os.PathLike[str] | None = None,
    ) -> None:
        """Touches no storage.

        Args:
            directory: Where backups lie; this group's own.
            every_steps: Steps between backups, >= 1. Default: as many as
                waste least of the time by Young's formula, see
                docs/resume.md, and at the end of each epoch.
            max_to_keep: Number of backups to keep, >= 2.
            warm_start: The directory of another training's `Backup`. As
                long as `directory` holds none, training starts at step 0
                with the weights and the optimizer's slots of the newest one
                there. A table of embeddings may have more rows than it had:
                the new ones keep their initial values. Counters start at 0,
                so that schedules start again, and the bias correction of Adam
                makes its first steps small. A model that this process has
                trained before keeps what it has learned. See docs/resume.md.
        """
        super().__init__()
        self._warm_start = None if warm_start is None else os.fspath(warm_start)
        self._backups = store.BackupStore(directory, max_to_keep=max_to_keep)
        self._every = (
            None if every_steps is None else steps.EverySteps(every_steps)
        )
        self._begun: replicas.FitBackup | None = None
        self._stoppers: list[keras.callbacks.EarlyStopping] = []
        self._data: Any = None
        self._epoch = self._num_done = 0
        self._last_step = -1
        # What was taken at a batch that may be the epoch's last: its step, and
        # what writes it.
        self._held: tuple[int, Callable[[], None]] | None = None
        # Whether one waits for its moment: on servers for `on_quiet`, when
        # nothing is in flight; else for the epoch's end.
        self.is_due = False
        self.num_skipped = 0
        self.resumed_step: int | None = None

    @property
    def directory(self) -> str:
        """Where the backups of the last `fit` are."""
        return self._backups.root

    @property
    def num_failed(self) -> int:
        """Number of backups that could not be written."""
        return self._backups.num_failed

    def begin_fit(
        self, model: keras.Model, others: Sequence[keras.callbacks.Callback]
    ) -> None:
        """Finds where to resume; every worker of the group calls it.

        `others` are the other callbacks of `fit`, some of which have a state
        to keep.
        """
        self._stoppers = [
            c for c in others if isinstance(c, keras.callbacks.EarlyStopping)
        ]
        self._backups.turn_to(fits.number(self._backups.base))
        is_new = not fits.has_trained(model.model)
        self._begun = replicas.FitBackup(
            self._backups,
            model.distribute_strategy,
            others,
            self._warm_start if is_new else None,
        )
        self.resumed_step = self.point.step if self.point else None
        self._last_step = self.point.step if self.point else -1

    @property
    def point(self) -> steps.TrainingPoint | None:
        """Where the present `fit` resumes; None to start at step 0."""
        chosen = self.begun.chosen
        return chosen.point if chosen else None

    def opened(self, epochs: keras_internals.EpochData) -> None:
        """Moves Keras' iterator over the training data to where `fit` begins.

        The first data that a `fit` opens are its training data.
        """
        if self._data is not None:
            return
        self._data = epochs
        epochs.count()
        if self.point:
            self._data.go_to(
                dict(self.point.data),
                batch=self.point.batch,
                from_batch=data.from_batch,
            )

    def end_fit(self) -> None:
        """Waits for a backup that is being written."""
        self._data = self._held = None
        if self._begun is not None:
            self._begun.close()
            self.num_skipped += self._begun.num_skipped
            self._begun = None

    @property
    def begun(self) -> replicas.FitBackup:
        """The backups of the present `fit`."""
        if self._begun is None:
            raise self.misplaced()
        return self._begun

    @property
    def _schedule(self) -> steps.EverySteps | interval.YoungsInterval:
        return self._every or self.begun.interval

    def _take(self, epoch: int, batch: int, *, wait: bool = False) -> None:
        self.is_due = False
        point = steps.TrainingPoint(
            step=self.step,
            epoch=epoch,
            batch=batch,
            data=self._data.position(),
        )
        self._held = self.step, self.begun.take_backup(point)
        # The end of an epoch has the same step, and logs that no training can
        # have which resumes after its last batch.
        if not batch or self.params.get("steps") is not None:
            self._write(wait=wait)

    def _write(self, *, wait: bool) -> bool:
        """Writes the backup that is held; returns whether there was one."""
        held, self._held = self._held, None
        if held is None:
            return False
        step, save = held
        if self.begun.write(save, step=step, wait=wait):
            self._last_step = step
        return True

    @property
    def _ends_epoch(self) -> bool:
        """Whether the epoch has had all its steps, as far as is known."""
        num_steps = self.params.get("steps")
        return num_steps is not None and self._num_done >= num_steps

    # ---- Keras' hooks ----

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Starts to count the steps."""
        super().on_train_begin(logs)
        # All others have begun.
        self.begun.restore_callbacks()
        self._check_seeds()
        self.is_due = False
        self._held = None
        self._backups.not_finite = None
        self._backups.replaces = False
        self._schedule.start(self.step)

    def _check_seeds(self) -> None:
        """Warns of data that come in another order than before the backup."""
        point = self.point
        if self._data is None or point is None:
            return
        # Nothing is read past where an epoch begins its data again, or is over.
        is_read = point.batch or point.data.get("is_kept")
        if not is_read or point.epoch >= self.params["epochs"]:
            return
        found = self._data.position()["seeds"]
        if [0, 0] in found or found != point.data.get("seeds", found):
            _log.warning(
                "The data are shuffled without a seed, or by another one than "
                "before the backup: in the current epoch, some examples come "
                "twice and others not at all. Pass `seed` to `shuffle`, or "
                "call keras.utils.set_random_seed with the same number each "
                "time, before you create the data set."
            )

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Notes the epoch."""
        super().on_epoch_begin(epoch, logs)
        self._epoch, self._num_done = epoch, 0

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Takes a backup when one is due, or asks for quiet to do so."""
        super().on_train_batch_end(batch, logs)
        if self._backups.not_finite:  # Ends the training, elsewhere.
            self.model.trainer.fail(self._backups.not_finite)
        self._num_done = batch + 1
        self.is_due |= self._schedule.due(self.step)
        if not self.on_servers:
            # The backup held is not from the epoch's last batch.
            if self._write(wait=ending.requested()) and ending.requested():
                ending.finish()
            # The last batch's backup waits for the end of the epoch, by which
            # validation is done and callbacks have decided.
            if self.is_due and not self._ends_epoch:
                self._take(self._epoch, self._num_done)
        if ending.requested():
            self._back_up_and_end()

    def _back_up_and_end(self) -> None:
        """Ends the task at a step after which a backup can be taken."""
        if self.on_servers:
            self.is_due = True  # `on_quiet` ends it.
        elif not self._ends_epoch:  # If it does, at the next step.
            self._take(self._epoch, self._num_done, wait=True)
            if self._held is None:  # Else after the next step.
                ending.finish()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Takes the backup of an epoch, or asks for quiet to do so."""
        self.is_due |= self._every is None
        if not self.on_servers and (self.is_due or self._held is not None):
            self._take_after_epoch()

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Backs up where training ended, so that it is not done again."""
        if self.on_servers:
            return
        epochs = self.params["epochs"]
        is_stopped = any(each.stopped_epoch > 0 for each in self._stoppers)
        is_restored = any(map(_has_restored, self._stoppers))
        is_last = is_restored and self._epoch + 1 >= epochs
        if is_stopped or is_last:
            # No epoch is to follow, and the weights may be other ones by now.
            self.read_step()
            self._backups.replaces = True
            self._take(epochs, 0, wait=True)
        elif self.step != self._last_step:
            self._take_after_epoch(wait=True)

    def _take_after_epoch(self, *, wait: bool = False) -> None:
        self.read_step()
        cut_short = self.model.stop_training and not self._ends_epoch
        if cut_short and self.params.get("steps") is not None:
            self._take(self._epoch, self._num_done, wait=wait)
        else:
            self._take(self._epoch + 1, 0, wait=wait)

    # ---- parameter servers: called by `TrainingEpochs` ----

    def on_quiet(self, point: steps.TrainingPoint) -> None:
        """Writes a backup; a failure is only logged.

        Then it ends the task, if that is wanted.
        """
        self.is_due = False
        self.begun.take_backup(point)
        if ending.requested():
            ending.finish()


def _has_restored(callback: keras.callbacks.EarlyStopping) -> bool:
    """Whether a callback has given a model its best weights of this `fit`."""
    is_asked = callback.restore_best_weights
    return is_asked and callback.best_weights is not None
