"""The global step between two steps, without asking the device each time."""

from typing import Any

import keras


class StepCounter:
    """Counts steps from Keras' callback hooks.

    Reading `optimizer.iterations` waits for the device, so it is read once an
    epoch and counted on from there.
    """

    def __init__(self) -> None:
        """Starts at step 0."""
        self.step = 0
        self._next_batch = 0
        self._is_fresh = True

    def read(self, model: keras.Model) -> None:
        """Takes the exact step from the optimizer.

        Args:
            model: A compiled model.
        """
        self.step = int(keras.ops.convert_to_numpy(model.optimizer.iterations))
        self._next_batch = 0
        self._is_fresh = True

    def begin(self, batch: int) -> None:
        """Notes the first batch since the step was read.

        Args:
            batch: Index in the epoch, as `on_train_batch_begin` gets it; not
                0 in an epoch that was resumed in its middle.
        """
        if self._is_fresh:
            self._next_batch, self._is_fresh = batch, False

    def advance(self, last_batch: int, *, num_batches: int | None) -> None:
        """Counts the batches up to and including `last_batch`.

        Args:
            last_batch: Index in the epoch, as `on_train_batch_end` gets it.
                With several steps an execution Keras gives the last one that
                was asked for, though the data may have ended before it.
            num_batches: Number of batches in the epoch, None if unknown.
        """
        next_batch = last_batch + 1
        if num_batches is not None:
            next_batch = min(next_batch, num_batches)
        self.step += next_batch - self._next_batch
        self._next_batch = next_batch


class EverySteps:
    """Says when a multiple of a number of steps has been passed."""

    def __init__(self, every_steps: int) -> None:
        """Checks the interval.

        Args:
            every_steps: The interval, >= 1.

        Raises:
            ValueError: It is not.
        """
        is_index = hasattr(every_steps, "__index__")
        if not is_index or isinstance(every_steps, bool) or every_steps < 1:
            raise ValueError(
                "`every_steps` must be a whole number >= 1; received "
                f"{every_steps!r}."
            )
        self.every_steps = int(every_steps)
        self._last = 0

    def start(self, step: int) -> None:
        """Starts to count at a step, which is not itself due."""
        self._last = step // self.every_steps

    def due(self, step: int) -> bool:
        """Whether a multiple was reached since the last time it was due."""
        reached = step // self.every_steps
        passed, self._last = reached > self._last, reached
        return passed


class SteppedCallback(keras.callbacks.Callback):
    """A callback that knows the global step; subclasses fill the hooks."""

    def __init__(self) -> None:
        """Starts at step 0."""
        super().__init__()
        self._counter = StepCounter()

    @property
    def step(self) -> int:
        """The global step: number of updates done."""
        return self._counter.step

    def on_train_begin(self, logs: Any = None) -> None:
        """Reads the step to start from."""
        self._counter.read(self.model)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Reads the exact step: an epoch may have ended early."""
        self._counter.read(self.model)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Notes where an epoch begins or is resumed."""
        self._counter.begin(batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts the steps of one execution."""
        num_batches = self.params.get("steps")
        if getattr(self.model, "tells_last_batch_done", False):
            self._counter.advance(batch, num_batches=None)
        elif num_batches is None and self.model.steps_per_execution > 1:
            self._counter.read(self.model)
        else:
            self._counter.advance(batch, num_batches=num_batches)
