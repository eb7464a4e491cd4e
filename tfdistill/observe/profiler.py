"""A trace of some training steps, as TensorBoard's profiler shows it."""

import logging
import os
from typing import Any

import tensorflow as tf

from tfdistill.observe import best_effort

# Another profiler runs in this process, or has stopped this one.
_ERRORS = (
    *best_effort.STORAGE_ERRORS,
    tf.errors.AlreadyExistsError,
    tf.errors.UnavailableError,
)
_log = logging.getLogger(__name__)


class StepTracer:
    """Traces the training steps from one to another, both included.

    The trace appears under `plugins/profile` of its directory once the last
    step is done; that wait is the only one in the training loop.
    """

    def __init__(
        self, directory: str | os.PathLike[str], steps: tuple[int, int] | None
    ) -> None:
        self._directory = os.fspath(directory)
        self._steps = steps
        self._is_running = False
        self._step: Any = None

    def begin_step(self, step: int, *, num_steps: int) -> None:
        """Starts the trace if it is due; `step` updates are done so far."""
        if self._steps is None:
            return
        first, last = self._steps
        if not self._is_running and first <= step + num_steps and step < last:
            self._start()
        if self._is_running:
            # By these the profiler tells one step from the next.
            self._step = tf.profiler.experimental.Trace(
                "train", step_num=step + 1, _r=1
            )
            self._step.__enter__()

    def end_step(self, step: int) -> None:
        """Ends the trace if its last step is done."""
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None
        if self._is_running and self._steps and step >= self._steps[1]:
            self._stop()

    def end(self) -> None:
        """Ends a running trace, and warns of one that never began."""
        if self._is_running:
            self._stop()
        elif self._steps is not None:
            _log.warning(
                "`profile_steps` %d:%d were not traced: this training did none "
                "of them.",
                *self._steps,
            )

    def _start(self) -> None:
        try:
            tf.io.gfile.makedirs(self._directory)
            tf.profiler.experimental.start(self._directory)
            self._is_running = True
        except _ERRORS as error:
            self._failed(error)

    def _stop(self) -> None:
        self._is_running, self._steps = False, None
        try:
            tf.profiler.experimental.stop()
            _log.info("The trace is under %s/plugins.", self._directory)
        except _ERRORS as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self._steps = None
        _log.warning(
            "The steps could not be traced, training goes on: %s: %s",
            type(error).__name__,
            error,
        )
