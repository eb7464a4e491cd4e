"""What a callback decides on one worker of several: agreed on, or an error.

Each worker runs its own callbacks, and one that looks at its clock, at a file
or at chance may decide what the others do not. A worker that stops alone leaves
the others in a collective, and one with other weights trains another model.
"""

import math
import types
import warnings
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill.cluster import replicas
from tfdistill.embedding import rows as table_rows
from tfdistill.training import steps

Logs = steps.Logs
_STOP = "stop_training"
# Hooks after which all workers agree in any case.
_AT_EPOCHS = frozenset(
    {"on_epoch_begin", "on_epoch_end", "on_train_begin", "on_train_end"}
)
# Sums of squares of weights, which replicas may add up in another order.
_TOLERANCE = 1e-5


class Together(keras.callbacks.Callback):
    """The last of the callbacks that decide: all workers continue alike.

    If one worker stops, all stop. They do so when an epoch begins or ends;
    within an epoch, after each execution, only if there is a callback whose
    code has `stop_training`: a gather takes as long as a small step. Otherwise
    a worker stops at the epoch's end. All begin an epoch with the chief's
    learning rate, and end it with the same weights.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        callbacks: Sequence[keras.callbacks.Callback],
    ) -> None:
        super().__init__()
        self._workers = replicas.WorkerValues(strategy)
        self._is_chief = replicas.is_chief(strategy)
        self._may_stop = any(map(may_stop, callbacks))
        self._is_late = False  # It wanted to stop when the others did not know.

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Learns whether a callback of any worker may stop in mid-epoch."""
        self._may_stop = any(self._workers.gathered(self._may_stop))

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Stops if any worker does."""
        if self._may_stop:
            self._stop()
        elif self.model.stop_training and math.isfinite(
            float((logs or {}).get("loss", 0.0))
        ):
            # All workers see a loss that isn't finite: `TerminateOnNaN`.
            self._is_late, self.model.stop_training = True, False

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Takes the chief's learning rate."""
        self._stop()
        optimizer = self.model.optimizer
        rate = float(optimizer.learning_rate) if optimizer else 0.0
        rates = self._workers.floats(rate)
        if all(each == rates[0] for each in rates):
            return
        optimizer.learning_rate = rates[0]
        if self._is_chief:
            warnings.warn(
                "The learning rate must be the same on all workers; received "
                f"{', '.join(f'{each:g}' for each in rates)}, by worker, at "
                f"the begin of epoch {epoch + 1}. All take the chief's. Let "
                "callbacks decide by what all workers see alike: the step, the "
                "epoch or the logs.",
                stacklevel=2,
            )

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Stops if any worker does; refuses weights that are not the same."""
        self._stop()
        own = _sum_of_squares(self.model)
        sums = self._workers.floats(own)
        others = [
            str(index)
            for index, each in enumerate(sums)
            if math.isfinite(each)
            and not math.isclose(each, sums[0], rel_tol=_TOLERANCE)
        ]
        if others:
            raise RuntimeError(
                "The weights must be the same on all workers; at the end of "
                f"epoch {epoch + 1}, worker {', '.join(others)} has other "
                "weights than worker 0. A callback that sets weights, or the "
                "learning rate within an epoch, must do so on all workers "
                "alike, by what all see alike: the step, the epoch or the logs."
            )

    def _stop(self) -> None:
        wants = int(bool(self.model.stop_training or self._is_late))
        self._is_late = False
        self.model.stop_training = any(self._workers.gathered(wants))


def _sum_of_squares(model: keras.Model) -> float:
    """Adds up what workers update alike, except large tables."""
    sums = [
        tf.reduce_sum(tf.square(tf.cast(variable.value, tf.float64)))
        for variable in model.trainable_variables
        if tf.as_dtype(variable.dtype).is_floating
        and math.prod(variable.shape) <= table_rows.BLOCK_ELEMENTS
    ]
    return float(tf.add_n(sums)) if sums else 0.0


def may_stop(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback's own code may stop a training within an epoch.

    Callbacks of Keras and of this package do so by the logs, as all workers
    do.
    """
    return any(_mentions_stop(each, set()) for each in _functions(callback))


_WRAPPERS = (types.MethodType, classmethod, staticmethod)


def _functions(callback: keras.callbacks.Callback) -> Iterator[Any]:
    spaces = [vars(callback)]
    for kind in type(callback).__mro__:
        if kind.__module__.partition(".")[0] not in ("keras", "tfdistill"):
            spaces.append(dict(vars(kind)))
    for space in spaces:
        for name, value in space.items():
            if isinstance(value, _WRAPPERS):
                value = value.__func__
            if name not in _AT_EPOCHS and isinstance(value, types.FunctionType):
                yield value


def _mentions_stop(function: types.FunctionType, seen: set[int]) -> bool:
    """Looks at a function, those within it, and those that it names."""
    codes = [function.__code__]
    for code in codes:  # It grows meanwhile.
        codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
        if _STOP in code.co_names or _STOP in code.co_consts:
            return True
    seen.add(id(function))
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    named = [
        function.__globals__.get(name)
        for code in codes
        for name in code.co_names
    ]
    return any(
        isinstance(each, types.FunctionType)
        and id(each) not in seen
        and _mentions_stop(each, seen)
        for each in (*cells, *named)
    )
