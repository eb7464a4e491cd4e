"""Callbacks whose files may fail, as on a full disk; training continues."""

import functools
import logging

import keras
import tensorflow as tf

from tfdistill.training import steps

_log = logging.getLogger(__name__)
# What TensorFlow raises if a file cannot be written: a full disk is
# OutOfRange to it. A lost peer (Unavailable, Aborted) is none of these.
ERRORS = (
    OSError,
    tf.errors.DataLossError,
    tf.errors.FailedPreconditionError,
    tf.errors.NotFoundError,
    tf.errors.OutOfRangeError,
    tf.errors.PermissionDeniedError,
    tf.errors.ResourceExhaustedError,
    tf.errors.UnknownError,
)


class IgnoreStorageErrors(steps.Around):
    """Runs another callback, and warns if its files cannot be written.

    `keras.callbacks.TensorBoard` and `ModelCheckpoint` stop training when the
    disk is full; wrapped in this callback, they don't. Only storage errors are
    caught (`OSError`, and TensorFlow's equivalents).

    Example:
        ```python
        IgnoreStorageErrors(keras.callbacks.TensorBoard("logs"))
        ```
    """

    # For callbacks that write files; see `guards.select`.
    chief_only = True

    def __init__(self, callback: keras.callbacks.Callback) -> None:
        """Takes the callback, whose hooks are called as Keras would."""
        super().__init__()
        self.callback = callback
        # How often a hook failed.
        self.num_failures = 0

    def set_params(self, params: object) -> None:
        """Hands on the parameters of `fit`."""
        super().set_params(params)
        self.callback.set_params(params)

    def set_model(self, model: keras.Model) -> None:
        """Hands on the model."""
        super().set_model(model)
        self._try("set_model", model)

    def _try(self, hook: str, *args: object, **kwargs: object) -> None:
        try:
            getattr(self.callback, hook)(*args, **kwargs)
        except ERRORS as error:
            self.num_failures += 1
            _log.log(
                logging.INFO if self.num_failures > 1 else logging.WARNING,
                "%s couldn't write its files in %s; training continues: %s",
                type(self.callback).__name__,
                hook,
                error,
            )


for _hook in dir(keras.callbacks.Callback):
    if _hook.startswith("on_"):
        _method = functools.partialmethod(IgnoreStorageErrors._try, _hook)
        setattr(IgnoreStorageErrors, _hook, _method)
