"""A training whose exports, refreshes and steps are timed as they happen."""

import dataclasses
import time
from typing import Any

import keras
import tensorflow as tf

import tfdistill

# The group that the one process both publishes as and learns from.
GROUP = 1
# One round: steps in which the newest version is read and swapped in, quiet
# steps with one snapshot held among them, an export, steps beside its writing
# and the reading that follows, and an export at the end for the next round.
_FIRST_QUIET_STEP, _HOLD_STEP, _EXPORT_STEP = 6, 8, 12
NUM_STEPS = 2 * _EXPORT_STEP
_READING_SECS = 0.5


@dataclasses.dataclass
class Steps:
    """Seconds of training steps, by what happened beside them."""

    quiet: list[float] = dataclasses.field(default_factory=list)
    after_snapshot: list[float] = dataclasses.field(default_factory=list)
    after_export: list[float] = dataclasses.field(default_factory=list)


class TimedExchange(tfdistill.Exchange):
    """Notes how long versions take to be written, in the background."""

    def __init__(self, root: str) -> None:
        super().__init__(root, max_to_keep=2, min_keep_secs=5.0)
        self.write_secs: list[float] = []

    def publish(self, *args: Any, **kwargs: Any) -> Any:
        """Publishes a version and notes the seconds."""
        start = time.perf_counter()
        version = super().publish(*args, **kwargs)
        self.write_secs.append(time.perf_counter() - start)
        return version


class TimedExporter(tfdistill.StudentExporter):
    """Notes how long each export holds up the training thread."""

    def __init__(self, exchange: TimedExchange) -> None:
        super().__init__(exchange, every_steps=_EXPORT_STEP, group=GROUP)
        self.blocked_secs: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Lets an export happen where one is due, under the clock."""
        skipped = self.num_skipped
        start = time.perf_counter()
        super().on_train_batch_end(batch, logs)
        elapsed = time.perf_counter() - start
        due = (batch + 1) % _EXPORT_STEP == 0
        if due and self.num_skipped == skipped:
            self.blocked_secs.append(elapsed)


class TimedLoader(tfdistill.TeacherLoader):
    """Notes how long each refresh holds up the training thread."""

    def __init__(self) -> None:
        super().__init__(every_steps=1)
        self.swapped_secs: list[float] = []
        self.idle_secs: list[float] = []
        self._waits = True

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts to read, and to wait for the first version."""
        super().on_train_begin(logs)
        self._waits = True

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Lets a refresh happen where one is ready, under the clock."""
        refreshes = self.num_refreshes
        start = time.perf_counter()
        super().on_train_batch_end(batch, logs)
        elapsed = time.perf_counter() - start
        swapped = self.num_refreshes > refreshes
        (self.swapped_secs if swapped else self.idle_secs).append(elapsed)
        self._waits = self._waits and not swapped
        if self._waits and batch + 1 < _FIRST_QUIET_STEP:
            # A small model's `fit` is over before anything could be read.
            time.sleep(_READING_SECS)


class CountingModel(tfdistill.CodistillModel):
    """Counts how often its training step is traced."""

    num_traces = 0

    def train_step(self, data: Any) -> dict[str, Any]:
        """Runs in Python once for each trace."""
        self.num_traces += 1
        return super().train_step(data)


class StepClock(keras.callbacks.Callback):
    """Times steps; must come first, so that no callback is in the time."""

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self._steps = steps
        self._held: list[tf.Tensor] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Starts the clock."""
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Files the time of the step under what happened beside it."""
        elapsed = time.perf_counter() - self._start
        step = batch + 1
        if step == _HOLD_STEP + 1:
            self._steps.after_snapshot.append(elapsed)
        elif step == _EXPORT_STEP + 1:
            self._steps.after_export.append(elapsed)
        elif _FIRST_QUIET_STEP <= step <= _EXPORT_STEP:
            self._steps.quiet.append(elapsed)
        # Reading shares the variables' buffers, as an exporter's snapshot
        # does: the next update pays for copies, here without a writer beside.
        held = self.model.student.variables if step == _HOLD_STEP else []
        self._held = [tf.convert_to_tensor(v.value) for v in held]
