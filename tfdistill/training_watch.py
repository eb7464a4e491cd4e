"""Notices a training that goes wrong without an error of its own."""

import math
import warnings
from typing import Any

import keras

from tfdistill import data_checks
from tfdistill import fit_arguments

_ACTIONS = ("raise", "warn")
# Asking for the loss waits for the device, so it is asked for now and then.
_CHECK_EVERY_EXECUTIONS = 100
_PARTS = ("task_loss", "distillation_loss", "distillation_weight")


def added_to(callbacks: Any) -> list[keras.callbacks.Callback]:
    """Returns the callbacks of `fit`, with those of this module before them.

    They come first so that nothing is saved or published of what they refuse.

    Args:
        callbacks: What `fit` is to run. A `CallbackList` is run as it is.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    found = keras.tree.flatten(callbacks or [])
    watches: list[keras.callbacks.Callback] = [_DataWatch()]
    # Who asked Keras to stop there quietly gets that.
    own = (FiniteLoss, keras.callbacks.TerminateOnNaN)
    if not any(isinstance(callback, own) for callback in found):
        watches.append(FiniteLoss())
    return [*watches, *found]


class FiniteLoss(keras.callbacks.Callback):
    """Ends a training whose loss is NaN or infinite, with an error.

    `fit` adds one by itself, unless there is one among its callbacks already,
    or Keras' `TerminateOnNaN`. The loss in the logs is a mean since the epoch
    began, so that no step is missed: it is looked at every hundredth execution
    and at the end of each epoch. All workers see the same one, and end alike.
    """

    def __init__(self, *, action: str = "raise") -> None:
        """Checks the action.

        Args:
            action: `"raise"` (default) or `"warn"`, once an epoch.

        Raises:
            ValueError: It is neither.
        """
        super().__init__()
        if action not in _ACTIONS:
            raise ValueError(
                f"`action` must be one of {_ACTIONS}; received {action!r}."
            )
        self._action = action
        self._epoch = self._num_executions = 0
        self._told = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begins to count; all workers count alike."""
        self._epoch, self._num_executions, self._told = epoch, 0, False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Looks at the loss now and then."""
        self._num_executions += 1
        if self._num_executions % _CHECK_EVERY_EXECUTIONS == 0:
            self._check(logs, f"by step {batch + 1}")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Looks at the loss."""
        self._check(logs, "at the end")

    def _check(self, logs: Any, where: str) -> None:
        loss = (logs or {}).get("loss")
        if loss is None or math.isfinite(float(loss)) or self._told:
            return
        parts = [f"{k} {float(logs[k]):g}" for k in _PARTS if k in logs]
        message = (
            f"The loss must be finite; received {float(loss):g} {where} of "
            f"epoch {self._epoch + 1}"
            f"{' (' + ', '.join(parts) + ')' if parts else ''}. Either the "
            "training has diverged: lower the learning rate or clip gradients "
            "(global_clipnorm). Or an example is not finite: "
            "tfdistill.data_checks.checked(dataset) names it."
        )
        if self._action == "raise":
            raise RuntimeError(message)
        warnings.warn(message, stacklevel=2)
        self._told = True


class _DataWatch(keras.callbacks.Callback):
    """Tells of data whose size was not known, and that were too few."""

    def __init__(self) -> None:
        super().__init__()
        self._num_steps = self._num_test_batches = 0
        self._is_first, self._has_begun = True, False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._num_steps, self._has_begun = 0, False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        # Not in an epoch whose steps were all done before a restart.
        self._has_begun = True

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._num_steps = batch + 1
        if self._is_first:
            self._is_first = False
            self._check_batch()

    def _check_batch(self) -> None:
        replicas = self.model.distribute_strategy.num_replicas_in_sync
        examples = getattr(self.model, "examples_of_last_execution", None)
        if replicas == 1 or examples is None:
            return
        size = round(float(examples) / self.model.steps_per_execution)
        if size < replicas:
            raise ValueError(fit_arguments.too_small_a_batch(size, replicas))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._has_begun and not self._num_steps:
            raise fit_arguments.no_batch(epoch)
        wanted = self.params.get("steps")
        if (
            wanted
            and self._num_steps < wanted
            and not self.model.stop_training
            and not getattr(self.model, "tells_last_batch_done", False)
        ):
            warnings.warn(
                f"The data ended after step {self._num_steps} of {wanted} of "
                f"epoch {epoch + 1}. Repeat them (`dataset.repeat()`) or lower "
                "`steps_per_epoch`.",
                stacklevel=2,
            )

    def on_test_begin(self, logs: Any = None) -> None:
        self._num_test_batches = 0

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._num_test_batches += 1

    def on_test_end(self, logs: Any = None) -> None:
        if not self._num_test_batches:
            raise data_checks.DataError(
                "`validation_data` must hold at least one batch; they ended "
                "before the first. See what their files, filters and "
                "generators leave."
            )
