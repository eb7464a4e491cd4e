"""Ends a `fit` at a step's end when its task is told to go, and backs up."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdistill import backup as backup_lib
from tfdistill import chief_only
from tfdistill import parameter_server
from tfdistill import preemption


@contextlib.contextmanager
def prompt(
    arguments: dict[str, Any], strategy: tf.distribute.Strategy
) -> Iterator[None]:
    """Has SIGTERM end a task during one call of `fit`.

    Where one process trains, or a coordinator does, and there is a
    `tfdistill.Backup`, a last backup is tried before. Several workers would
    first have to agree on a step: they end at once, and go on from the backup
    before.

    Args:
        arguments: Those of the call; a callback may be added.
        strategy: That of the model.
    """
    preemption.install()
    callbacks = arguments.get("callbacks")
    found = callbacks if isinstance(callbacks, list) else []
    backups = [c for c in found if isinstance(c, backup_lib.Backup)]
    if not backups or chief_only.num_workers(strategy) > 1:
        yield
        return
    arguments["callbacks"] = [*found, _BackUpAndEnd(backups[0])]
    with preemption.deferred():
        yield


class _BackUpAndEnd(keras.callbacks.Callback):
    """Comes after the backup's own hooks."""

    def __init__(self, backup: backup_lib.Backup) -> None:
        super().__init__()
        self._backup = backup
        self._has_asked = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        steps = (self.params or {}).get("steps")
        if not preemption.requested():
            return
        if parameter_server.is_used(self.model.distribute_strategy):
            self._ask_for_quiet()
        elif steps is None or batch + 1 < steps:
            self._backup.backup_now()
            preemption.finish()
        # A backup after an epoch's last step is due once callbacks have seen
        # the epoch's end, so that the next step is soon enough.

    def _ask_for_quiet(self) -> None:
        """Waits, step by step, until what is in flight is done and saved."""
        if not self._has_asked:
            self._has_asked = self._backup.wants_quiet = True
        elif not self._backup.wants_quiet:
            preemption.finish()
