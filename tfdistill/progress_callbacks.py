"""Has `fit`, `evaluate` and `predict` report that they get on.

A hang is told from slow code by what a task is at, so one callback comes before
all others and one after them: what lies between is the user's.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from tfdistill import progress


class _Reporting(keras.callbacks.Callback):
    """A callback that never makes Keras wait for a step's logs."""

    async_safe = True


class _Before(_Reporting):
    """The first of all callbacks: a step is done, and theirs is the turn."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        progress.own().say(progress.CALLBACKS)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        progress.own().say(progress.CALLBACKS)

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        progress.own().say(progress.CALLBACKS)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        progress.own().say(progress.EPOCH_END)


class _After(_Reporting):
    """The last of all callbacks: the next step is on its way."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        progress.own().say(progress.FIRST_STEP)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        steps = (self.params or {}).get("steps")
        ends = steps is not None and batch + 1 >= steps
        progress.own().say(progress.EPOCH_END if ends else progress.STEP)

    def on_test_begin(self, logs: Any = None) -> None:
        progress.own().say(progress.FIRST_EVALUATION_STEP)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        progress.own().say(progress.EVALUATION_STEP)

    def on_test_end(self, logs: Any = None) -> None:
        # What follows is Keras' own, or callbacks at the end of an epoch.
        progress.own().say(progress.EPOCH_END)

    def on_predict_begin(self, logs: Any = None) -> None:
        progress.own().say(progress.FIRST_PREDICTION_STEP)

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        progress.own().say(progress.PREDICTION_STEP)

    def on_predict_end(self, logs: Any = None) -> None:
        # The results of all batches are put together.
        progress.own().say(progress.EPOCH_END)


@contextlib.contextmanager
def reported(arguments: dict[str, Any]) -> Iterator[None]:
    """Reports the progress of one call of `fit`, `evaluate` or `predict`.

    A `CallbackList` of the user's own is left as it is; then nothing is
    reported, and nobody takes the task for stuck.

    Args:
        arguments: Those of the call; its `callbacks` are replaced.
    """
    reporter = progress.own()
    callbacks = arguments.get("callbacks")
    if not reporter.is_heard:
        yield
        return
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        given = keras.tree.flatten(callbacks or [])
        arguments["callbacks"] = [_Before(), *given, _After()]
    # One call may be made within another, and may end by an exception.
    with reporter.returning():
        yield
