"""Finds how many steps an execution should have, while `fit` trains.

Each execution costs some fixed time: Keras' loop and its callbacks, the call of
a graph, on servers a message there and back. More steps share this cost. A step
computes the same, and callbacks determine where executions end, so the number
changes only the speed.
"""

import inspect
import logging
import time
import weakref
import zlib
from collections.abc import Callable
from collections.abc import Generator
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill.cluster import replicas
from tfdistill.system import keras_internals
from tfdistill.training import steps

Logs = steps.Logs
_log = logging.getLogger(__name__)
# Four times as many at once: what each trial gains is more than a busy machine
# takes, and where each number has its own graph, there are few.
_GROWTH = 4
# The least gain in steps a second; the gain still left is about a third of it.
_LEAST_GAIN = 1.05
# The best window counts: others were held up by something else.
_LEAST_SECS, _NUM_WINDOWS = 0.1, 3
_BATCH_HOOKS = (
    *("on_batch_begin", "on_batch_end"),
    *("on_train_batch_begin", "on_train_batch_end"),
)


def acts_by_batches(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback acts by batches, and does not say at which.

    A user's callback may define `next_due(step)`, the next step after which it
    acts, as callbacks of this package do. The counts of Keras' own callbacks
    are known, except for the batches of a `BackupAndRestore`, which counts one
    less an epoch when executions are longer.
    """
    if isinstance(callback, steps.ActsAtSteps):
        return False
    if isinstance(callback, steps.Around):
        # Keras would count executions there, in the place of batches.
        within, board = callback.callback, keras.callbacks.TensorBoard
        is_counting = isinstance(within, board) or _every(within) is not None
        return is_counting or acts_by_batches(within)
    for name in _BATCH_HOOKS:
        hook = getattr(callback, name)
        # A partial function has no module.
        home = f"{hook.__module__}" if inspect.isroutine(hook) else ""
        if not home.startswith("keras."):
            return True
    is_backup = isinstance(callback, keras.callbacks.BackupAndRestore)
    return is_backup and callback.save_freq != "epoch"


def _every(callback: keras.callbacks.Callback) -> int | None:
    """Returns after how many batches one of Keras' callbacks acts, if by any.

    `ModelCheckpoint` and `OrbaxCheckpoint` by `save_freq`, `TensorBoard` by
    `update_freq`.
    """
    found = [getattr(callback, n, None) for n in ("save_freq", "update_freq")]
    return next((each for each in found if type(each) is int), None)


class TensorBoardBatches(steps.SteppedCallback):
    """Makes Keras' TensorBoard count batches, where it counts executions.

    It comes before the TensorBoard callbacks, so that they write the values of
    an execution at its last batch.
    """

    # They are not run elsewhere.
    chief_only = True

    def __init__(self, boards: Sequence[keras.callbacks.TensorBoard]) -> None:
        super().__init__()
        self._boards = boards

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Adds the batches that they have not counted."""
        before = self.step
        super().on_train_batch_end(batch, logs)
        for board in self._boards:
            keras_internals.count_batches(board, self.step - before - 1)


class AutoSteps(steps.SteppedCallback):
    """The number of steps of an execution, for `steps_per_execution="auto"`.

    `fit` adds it behind all callbacks that count steps. The number starts at
    one and grows while steps a second do; then it stays, also for later calls
    of `fit`. The chief's clock decides, by a collective, so that all workers
    of a group grow at the same step.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        *,
        most: int,
        longest_secs: float,
        num_unsteady: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Starts at one, and has `most` at most.

        An execution longer than `longest_secs` has nothing to gain, and the
        first `num_unsteady` after a change show nothing yet.
        """
        super().__init__()
        # The numbers up to `count` that were tried.
        self.sizes = [1]
        self._strategy = strategy
        self._most, self._longest_secs = most, longest_secs
        self._num_unsteady, self._clock = num_unsteady, clock
        self._is_held = self._is_found = False
        # Keras' callbacks that count batches, and each how many; the steps at
        # which they act; and what they have counted since, from one `fit` to
        # the next.
        self._counting: dict[keras.callbacks.Callback, int] = {}
        self._schedules: list[steps.EverySteps] = []
        self._once: list[int] = []
        self._counted: Any = weakref.WeakKeyDictionary()
        self._others: list[steps.ActsAtSteps] = []
        self._opens_training = False
        self._search = self._grow()
        next(self._search)

    @property
    def count(self) -> int:
        """Steps of an execution, unless a callback is due before."""
        return 1 if self._is_held else self.sizes[-1]

    def next_count(self, step: int | None = None) -> int:
        """Steps of the execution that begins at a step; by default the next."""
        step = self.step if step is None else step
        return min([self.count, *(due - step for due in self._due_after(step))])

    def next_size(self, most: int) -> int:
        """Returns the largest of `sizes` that is at most `most`; 0 for 0."""
        return max((size for size in self.sizes if size <= most), default=0)

    def for_opened(self) -> Callable[[], int]:
        """Returns what says how many steps come next, of data just opened.

        The first that a `fit` opens are its training data.
        """
        is_training, self._opens_training = self._opens_training, False
        return self.next_count if is_training else lambda: self.count

    def _due_after(self, step: int) -> list[int]:
        found = [callback.next_due(step) for callback in self._others]
        found += [schedule.next(step) for schedule in self._schedules]
        found += [due for due in self._once if due > step]
        return [due for due in found if due is not None]

    def meet(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        """Finds the callbacks that determine where executions end."""
        self._opens_training = True
        acting = [type(c).__name__ for c in callbacks if acts_by_batches(c)]
        self._is_held = bool(acting)
        if acting:
            _log.info(
                "Each execution has one step, for %s, which acts by batches. "
                "Give it a method `next_due(step)`, or pass a number as "
                "`steps_per_execution`.",
                ", ".join(acting),
            )
        self._others = [
            each
            for each in callbacks
            if isinstance(each, steps.ActsAtSteps) and each is not self
        ]
        found = ((each, _every(each)) for each in callbacks)
        self._counting = {c: every for c, every in found if every is not None}

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Checks that executions will end at the same steps on all workers."""
        super().on_train_begin(logs)
        self._count_with_keras()
        self._last: float | None = None
        self._workers = replicas.WorkerValues(self._strategy)
        if replicas.num_workers(self._strategy) == 1:
            return
        due = repr(sorted(self._due_after(self.step)))
        if len(set(self._workers.gathered(zlib.crc32(due.encode())))) > 1:
            raise ValueError(
                "`callbacks` must be the same on all workers of a group with "
                '`steps_per_execution="auto"`; received some with other '
                f"intervals, here the next steps {due}. Pass all callbacks on "
                "every worker: `fit` runs those that write on the chief only."
            )

    def _count_with_keras(self) -> None:
        """Finds when Keras' callbacks act, in a `fit` that begins here."""
        self._begin, self._schedules, self._once = self.step, [], []
        for callback, every in self._counting.items():
            begin = self.step
            if isinstance(callback, keras.callbacks.TensorBoard):
                first, last = keras_internals.profiled_batches(callback)
                self._once += [begin + first - 1, begin + last]
            else:
                begin -= self._counted.get(callback, 0)
            self._schedules.append(steps.EverySteps(every, offset_steps=begin))

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Notes what Keras' callbacks have counted since they last acted."""
        for callback, every in self._counting.items():
            counted = self._counted.get(callback, 0) + self.step - self._begin
            self._counted[callback] = counted % every

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Does not count the time since the last epoch."""
        super().on_epoch_begin(epoch, logs)
        self._last = None

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Adds an execution to what is measured."""
        before = self.step
        super().on_train_batch_end(batch, logs)
        if self._is_found or self._is_held:
            return
        last, self._last = self._last, self._clock()
        if last is not None:
            self._search.send((self.step - before, self._last - last))

    def _grow(self) -> Generator[None, tuple[int, float], None]:
        """Grows while steps a second do, by each execution's steps and seconds.

        By the best rate of each number, which then grows, stays or goes back.
        """
        best, length = 0.0, 4  # Executions of a window.
        while True:
            for _ in range(self._num_unsteady):
                yield
            # Steps a second, and seconds an execution.
            windows: list[tuple[float, float]] = []
            while len(windows) < _NUM_WINDOWS:
                done, spent = 0, 0.0
                for _ in range(length):
                    num_steps, secs = yield
                    done, spent = done + num_steps, spent + secs
                # The chief's time on all workers, above 0.
                spent = self._workers.chiefs(max(1e-6, spent))
                if spent < _LEAST_SECS:
                    length *= 2
                else:
                    windows.append((done / spent, spent / length))
            rate, secs = max(windows)
            if rate < best * _LEAST_GAIN:
                if rate < best:
                    self.sizes.pop()
                break
            best, count = rate, self.count * _GROWTH
            if count > self._most or secs * _GROWTH > self._longest_secs:
                break
            self.sizes.append(count)
            length = max(1, length // _GROWTH)
        self._is_found = True
        yield


def added(
    callbacks: Sequence[keras.callbacks.Callback], auto: AutoSteps
) -> list[keras.callbacks.Callback]:
    """Returns the callbacks of a `fit` with `auto`, and what it needs."""
    boards = [
        each
        for each in callbacks
        if isinstance(each, keras.callbacks.TensorBoard)
    ]
    before = [TensorBoardBatches(boards)] if boards else []
    return [*before, *callbacks, auto]
