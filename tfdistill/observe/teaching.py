"""Whether a training had any teacher: without one it was no codistillation."""

import logging
from typing import Any

import keras
import tensorflow as tf

from tfdistill.system import keras_internals

_log = logging.getLogger(__name__)


class TeachingWatch(keras.callbacks.Callback):
    """Warns at the end of a training in which no step had a teacher.

    `CodistillModel.fit` adds one if the model has teachers. It looks at the
    logs of epochs, in which the distillation loss is 0 if no teacher was
    asked, so that no step waits for it.
    """

    chief_only = True

    def __init__(self) -> None:
        super().__init__()
        # Why there was no teacher, once training has ended.
        self.untaught: str | None = None
        self._is_taught = False
        self._num_epochs = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Forgets a previous training."""
        self.untaught = None
        self._is_taught, self._num_epochs = False, 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Sees whether any step so far had a teacher."""
        self._num_epochs += 1
        names = ("distillation_loss", "distillation_weight")
        found = [float(logs[name]) for name in names if name in (logs or {})]
        # A step that logs neither is the user's own, of which nothing is known.
        self._is_taught |= any(found) or not found

    def on_train_end(self, logs: Any = None) -> None:
        """Warns if no step had a teacher, and says why."""
        if self._num_epochs and not self._is_taught:
            self.untaught = self._reason()
            _log.warning(
                "No step of this training had a teacher: %s", self.untaught
            )

    def _reason(self) -> str:
        model: Any = self.model
        done = int(keras_internals.num_batches(model.optimizer).numpy())
        last = tf.constant(max(0, done - 1), tf.int64)
        if not float(model.teachers.weight(last)):
            return (
                f"`distillation_weight` was still 0 at step {done}. "
                "Shorten the burn-in, or train for longer."
            )
        teachers = "; ".join(map(_described, model.teachers.status()))
        remedy = "See what the teacher predicts of one batch of the data."
        if model.teachers.follows_peers:
            remedy = (
                "Train for longer, export more often (`every_steps` of the "
                "StudentExporter), or let the groups begin together "
                "(StartTogether)."
            )
        return f"{teachers}. {remedy}"


def _described(teacher: dict[str, Any]) -> str:
    step, reason = teacher["step"], teacher["reason"]
    version = f"version {step}" if step >= 0 else "no version in use"
    health = teacher["health"].replace("_", " ")
    return f"{teacher['name']} is {health} ({reason or version})"
