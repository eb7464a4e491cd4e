"""What a step tells callbacks: its number, its examples, its details.

It travels among the logs as far as the training function's caller: from any
replica, by any loop, and from the workers of parameter servers.
"""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf


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


_Base: Any = keras.Model if typing.TYPE_CHECKING else object
_PREFIX = "_tfdistill/"
# Number of examples in the step's batch.
EXAMPLES = "_examples"


def hidden(name: str, values: tf.Tensor) -> dict[str, tf.Tensor]:
    """Returns logs that `fit` does not show, one for each value.

    Args:
        name: What is told.
        values: `[count]`.
    """
    return {
        f"{_PREFIX}{name}/{index}": value
        for index, value in enumerate(tf.unstack(values))
    }


class StepDetails(_Base):
    """Keeps the details of the last execution for callbacks.

    Attributes:
        examples_of_last_execution: Number of examples, a float scalar.
    """

    examples_of_last_execution: Any = 0.0
    # In a function: Keras must not track what it holds.
    _details: Any = staticmethod(dict)

    def detail(self, name: str) -> list[Any] | None:
        """Returns float scalars of the last step of the last execution.

        Reading their values waits for the device.

        Args:
            name: What `hidden` was called with.

        Returns:
            The values, in order; None where the step does not tell it.
        """
        return self._details().get(name)

    def shown_logs(self, logs: dict[str, Any]) -> dict[str, Any]:
        """Takes the details out of an execution's logs.

        Args:
            logs: Of the last step.
        """
        shown: dict[str, Any] = {}
        details: dict[str, list[Any]] = {}
        for key, value in logs.items():
            if key.startswith(_PREFIX):
                name = key.split("/")[1]
                details.setdefault(name, []).append((key, value))
            else:
                shown[key] = value
        found = {
            name: [value for _, value in sorted(pairs, key=_index)]
            for name, pairs in details.items()
        }
        self._details = lambda: found
        return shown


def _index(pair: tuple[str, Any]) -> int:
    return int(pair[0].rpartition("/")[2])


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingPoint:
    """Where a training stands between two steps, with none in flight.

    Attributes:
        step: Number of updates done.
        epoch: Index of the epoch in progress.
        batch: Number of its steps done.
        metric_sums: What its metrics have added up so far, under parameter
            servers.
        data: How far the data were read, without them.
    """

    step: int
    epoch: int
    batch: int
    metric_sums: tuple[float, ...] = ()
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
