"""The callbacks that `fit` adds: finite values, data, progress, watchdog.

A hang is told from slow code by what a task is at, so one callback comes before
all others and one after them: what lies between is the user's.
"""

import contextlib
import faulthandler
import functools
import math
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistill import data
from tfdistill.cluster import ending
from tfdistill.cluster import links
from tfdistill.cluster import replicas
from tfdistill.cluster import signs
from tfdistill.cluster import strategy as strategy_lib
from tfdistill.embedding import rows as table_rows
from tfdistill.system import fits
from tfdistill.system import keras_internals
from tfdistill.system import processes
from tfdistill.training import fit_arguments
from tfdistill.training import steps
from tfdistill.training import together

Logs = steps.Logs


class StepWatchdog(keras.callbacks.Callback):
    """Ends a task of several that has made no step for too long.

    Any batch or epoch counts as progress. The limit is
    `TFDISTILL_STALL_TIMEOUT_SECS`, by default half an hour.

    In a collective a worker waits for as long as a peer is alive, even if it is
    stuck. TensorFlow's own limit for collectives keeps two threads for each
    until it has run out, thousands of them at a few collectives a step. One
    thread that looks at the clock does it.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        *,
        end: Callable[[int], Any] = os._exit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reads the limit; `end` takes the exit code.

        `os._exit` skips every clean-up: a thread that hangs in TensorFlow
        cannot be asked.
        """
        super().__init__()
        self._limit_secs = ending.limit_from_env(
            "TFDISTILL_STALL_TIMEOUT_SECS", 1800.0
        )
        jobs = keras_internals.jobs_of(strategy)
        self._addresses = [address for job in jobs.values() for address in job]
        self._end, self._clock = end, clock
        self._heard = clock()
        self._stopped = threading.Event()

    def _watch(self) -> None:
        while not self._stopped.wait(min(1.0, self._limit_secs / 4)):
            if self._clock() - self._heard > self._limit_secs:
                print(f"tfdistill: {self._explain()}", file=sys.stderr)
                faulthandler.dump_traceback(all_threads=True)
                sys.stderr.flush()
                self._end(signs.EXIT_RETRY)
                return

    def _explain(self) -> str:
        missing = [
            address
            for address in self._addresses
            if processes.ask(address) is not processes.Answer.OPEN
        ]
        return (
            f"no step was finished in {self._limit_secs:.0f} s, so a worker of "
            f"the group is stuck. Workers that do not answer: "
            f"{', '.join(missing) or 'none'}. Where each thread of this one "
            "stands is below. Steps, evaluations and callbacks that take "
            "longer need a higher TFDISTILL_STALL_TIMEOUT_SECS (0 for no "
            "limit)."
        )

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Starts the watch."""
        self._heard = self._clock()
        if self._limit_secs:
            threading.Thread(
                target=self._watch, name="tfdistill-watchdog", daemon=True
            ).start()

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Ends the watch."""
        self._stopped.set()

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Counts as progress."""
        self._heard = self._clock()

    on_test_batch_end = on_epoch_end = on_train_batch_end


def listed(callbacks: object) -> list[keras.callbacks.Callback]:
    """Returns what `fit` got as `callbacks`, as a new list."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        raise ValueError(
            "`callbacks` must be a list of callbacks, to which `fit` adds its "
            "own; received a CallbackList. Pass the callbacks that it holds."
        )
    found = keras.tree.flatten(callbacks or [])
    for each in found:
        if isinstance(each, type):
            raise ValueError(
                "`callbacks` must be objects; received the class "
                f"{each.__name__}. Call it: {each.__name__}(...)."
            )
    return found


@contextlib.contextmanager
def over(
    arguments: dict[str, Any], strategy: tf.distribute.Strategy
) -> Iterator[None]:
    """Guards one call of `fit`, whose `callbacks` are replaced.

    Faulty data are an error that says which; a loss that is not finite ends the
    training; a task that hangs ends, as does one that gets SIGTERM; and the
    launcher hears how far the task is.
    """
    given = arguments["callbacks"]
    callbacks = select(given, strategy)
    # Before all others: nothing is saved or published of what they refuse.
    kind = keras.callbacks.TerminateOnNaN
    if not any(isinstance(each, kind) for each in callbacks):
        callbacks = [TerminateOnNonFinite(), *callbacks]
    callbacks = [_DataWatch(), *callbacks]
    with contextlib.ExitStack() as stack:
        stack.enter_context(data.told())
        several = replicas.num_workers(strategy) > 1
        if several:
            _stop_autologging(strategy)
            callbacks.append(together.Together(strategy, given))
            stack.enter_context(_exit_told())
        if several or replicas.on_servers(strategy):
            watch = StepWatchdog(strategy)
            callbacks.append(watch)
            stack.callback(watch.on_train_end)  # Also after an error.
            cluster = strategy_lib.cluster_of(strategy)
            others = dict(cluster.addresses)
            others.pop(cluster.task_name, None)
            stack.callback(links.watch(cluster.task_name, others).set)
        arguments["callbacks"] = callbacks
        ending.install()
        stack.enter_context(reported(arguments))
        yield


@contextlib.contextmanager
def _exit_told() -> Iterator[None]:
    """Tells the other workers why, if code within ends the program."""
    try:
        yield
    except SystemExit as error:
        keras_internals.tell_cluster(f"SystemExit({error.code}) in `fit`")
        raise


# By name, since not every Keras has all of them.
_WRITERS = frozenset(
    {
        "CSVLogger",
        "ModelCheckpoint",
        "OrbaxCheckpoint",
        "RemoteMonitor",
        "TensorBoard",
    }
)
# Packages whose callbacks report to an experiment tracker.
TRACKERS = frozenset(
    {
        "aim",
        "clearml",
        "comet_ml",
        "dvclive",
        "mlflow",
        "neptune",
        "neptune_tensorflow_keras",
        "wandb",
    }
)


def _is_chief_only(callback: keras.callbacks.Callback) -> bool:
    """Whether a group of several workers runs a callback on its chief only.

    An attribute `chief_only` of the callback's own decides, if there is one.
    """
    if isinstance(callback, steps.ChiefOnly):
        if callback.chief_only is not None:
            return bool(callback.chief_only)
    kinds = [
        (kind.__module__.partition(".")[0], kind.__name__)
        for kind in type(callback).__mro__
    ]
    return any(
        home in TRACKERS or (home == "keras" and name in _WRITERS)
        for home, name in kinds
    )


def select(
    callbacks: list[keras.callbacks.Callback], strategy: tf.distribute.Strategy
) -> list[keras.callbacks.Callback]:
    """Keeps the callbacks that this task runs.

    Those that only write stay on the chief; all others run on every worker,
    since they may change the training.
    """
    if replicas.num_workers(strategy) == 1:
        return callbacks
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise ValueError(
                "keras.callbacks.BackupAndRestore does not work on several "
                "workers: each would overwrite the others' files and only one "
                "would be restored. Leave it out of an ordinary script, which "
                "has a backup with TFDISTILL_WORKDIR; in code, use "
                "tfdistill.callbacks.Backup."
            )
    if replicas.is_chief(strategy):
        return callbacks
    return [c for c in callbacks if not _is_chief_only(c)]


def _stop_autologging(strategy: tf.distribute.Strategy) -> None:
    """Stops `mlflow.autolog`, which patches Keras, except on the chief.

    Each call of `fit` would begin one on each worker.
    """
    if replicas.is_chief(strategy):
        return
    for name in ("mlflow.keras", "mlflow.tensorflow"):
        if flavor := sys.modules.get(name):
            flavor.autolog(disable=True)


def first_not_finite(model: keras.Model) -> str | None:
    """Returns the path of a weight that holds NaN or infinity, if any.

    All workers of a group call it at the same step and get the same answer,
    though moving statistics are each replica's own. Each weight is looked at
    where it lies.
    """
    strategy = model.distribute_strategy
    floats = [
        variable
        for variable in model.variables
        if tf.as_dtype(variable.dtype).is_floating
    ]
    if not floats:
        return None
    found = [
        tf.reduce_all([_is_finite(copy) for copy in copies])
        for copies in (
            strategy.experimental_local_results(v.value) for v in floats
        )
    ]
    bad = np.flatnonzero([not is_fine for is_fine in tf.stack(found).numpy()])
    first = int(bad[0]) if bad.size else -1
    if replicas.num_workers(strategy) > 1:
        first = max(replicas.WorkerValues(strategy).gathered(first))
    return None if first < 0 else floats[first].path


def _is_finite(variable: tf.Variable) -> tf.Tensor:
    """Looks at a variable on its device, and at a large one in blocks.

    A block is gathered, since reading a variable that has had sparse updates
    copies all of it.
    """
    with tf.device(variable.device):
        size = variable.shape.num_elements()
        if size <= table_rows.BLOCK_ELEMENTS:
            return tf.reduce_all(tf.math.is_finite(variable))
        num_rows = int(variable.shape[0])
        return tf.reduce_all(
            [
                tf.reduce_all(
                    tf.math.is_finite(
                        tf.gather(variable, tf.range(first, last))
                    )
                )
                for first, last in table_rows.blocks(num_rows, size // num_rows)
            ]
        )


# Asking for the loss waits for the device, so it is asked for now and then.
_CHECK_EVERY_EXECUTIONS = 100


class TerminateOnNonFinite(keras.callbacks.Callback):
    """Ends a training whose loss or weights are NaN or infinite, by an error.

    `fit` adds one, unless Keras' `TerminateOnNaN` is among its callbacks, which
    stops without an error.
    The loss in the logs is a mean since the epoch began, so that no step is
    missed: it is looked at every hundredth execution and at the end of each
    epoch. All workers see the same one, and end alike.

    The loss can stay finite when the weights are not, as ReLU turns NaN into 0.
    So the weights are looked at at the end of each epoch; and an export or a
    backup that finds one that is not finite ends the training, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._epoch = self._num_executions = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Forgets what an earlier training came to."""
        self.model.trainer.not_finite = None

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Begins to count; all workers count alike."""
        self._epoch, self._num_executions = epoch, 0

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Looks at the loss now and then; hears of exports and backups."""
        if found := self.model.trainer.not_finite:
            raise _weights_error(found)
        self._num_executions += 1
        if self._num_executions % _CHECK_EVERY_EXECUTIONS == 0:
            self._check_finite(logs, f"by step {batch + 1}")

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Looks at the loss and the weights."""
        self._check_finite(logs, "at the end")
        if found := first_not_finite(self.model):
            raise _weights_error(f"{found} at the end of epoch {epoch + 1}")
        _check_loss_scale(self.model.optimizer)

    def _check_finite(self, logs: Logs | None, where: str) -> None:
        logs = logs or {}
        loss = logs.get("loss")
        if loss is None or math.isfinite(float(loss)):
            return
        parts = [
            f"{name} {float(logs[name]):g}"
            for name in (*steps.PARTS, "distillation_weight")
            if name in logs
        ]
        raise RuntimeError(
            f"The loss must be finite; received {float(loss):g} {where} of "
            f"epoch {self._epoch + 1}"
            f"{' (' + ', '.join(parts) + ')' if parts else ''}. If the "
            "training has diverged, lower the learning rate or clip gradients "
            "(global_clipnorm). If an example is not finite, "
            "tfdistill.data.checked(dataset) finds it."
        )


def _check_loss_scale(optimizer: keras.Optimizer) -> None:
    """Warns if most steps were left out, which neither loss nor weights show.

    The scale of mixed_float16 is halved whenever gradients are not finite.
    """
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return
    scale = float(optimizer.dynamic_scale)
    if scale < min(1.0, optimizer.initial_scale):
        warnings.warn(
            f"The loss scale of mixed_float16 has fallen to {scale:g} from "
            f"{optimizer.initial_scale:g}: gradients were not finite in many "
            "steps, which were skipped. If this continues, the model learns "
            "nothing: scale the inputs, check for gradients such as the "
            "gradient of sqrt(0), or use mixed_bfloat16.",
            stacklevel=2,
        )


def _weights_error(found: str) -> RuntimeError:
    return RuntimeError(
        f"The weights must be finite; received NaN or infinity in {found}. "
        "Either an example is not finite, which layers such as ReLU can hide "
        "from the loss: tfdistill.data.checked(dataset) names it. Or the "
        "training has diverged: lower the learning rate or clip gradients "
        "(global_clipnorm)."
    )


class _DataWatch(keras.callbacks.Callback):
    """Reports data whose size was not known, and that were too few."""

    def __init__(self) -> None:
        super().__init__()
        self._num_steps = self._num_test_batches = 0
        self._has_begun = False

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._num_steps, self._has_begun = 0, False

    def on_train_batch_begin(
        self, batch: int, logs: Logs | None = None
    ) -> None:
        # Not in an epoch whose steps were all done before a restart, or it
        # begins after them.
        self._has_begun, self._num_steps = True, batch

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self._num_steps = batch + 1
        fits.note_step()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if self._has_begun and not self._num_steps:
            raise fit_arguments.no_batch(epoch)
        if replicas.num_workers(self.model.distribute_strategy) > 1:
            # For callbacks that predict, each worker by itself.
            self.model.average_statistics()
        wanted = self.params.get("steps")
        if (
            wanted
            and self._has_begun
            and self._num_steps < wanted
            and not self.model.stop_training
        ):
            warnings.warn(
                f"The data ended after step {self._num_steps} of {wanted} of "
                f"epoch {epoch + 1}. Repeat the data (`dataset.repeat()`) or "
                "lower `steps_per_epoch`.",
                stacklevel=2,
            )

    def on_test_begin(self, logs: Logs | None = None) -> None:
        self._num_test_batches = 0

    def on_test_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self._num_test_batches += 1

    def on_test_end(self, logs: Logs | None = None) -> None:
        if not self._num_test_batches:
            raise data.DataError(
                "`validation_data` must hold at least one batch; it ended "
                "before the first. Check how much data its files, filters and "
                "generators leave."
            )


# What a task is at, by the hooks of the first of all callbacks: a step is done,
# and theirs is the turn.
_BEFORE = {
    "on_train_batch_end": signs.CALLBACKS,
    "on_epoch_end": signs.EPOCH_END,
    "on_test_batch_end": signs.CALLBACKS,
    "on_predict_batch_end": signs.CALLBACKS,
}
# And of the last of them: the next step is on its way.
_AFTER = {
    "on_epoch_begin": signs.FIRST_STEP,
    "on_train_batch_end": signs.STEP,
    "on_test_begin": signs.FIRST_EVALUATION_STEP,
    "on_test_batch_end": signs.EVALUATION_STEP,
    "on_test_end": signs.EPOCH_END,
    "on_predict_begin": signs.FIRST_PREDICTION_STEP,
    "on_predict_batch_end": signs.PREDICTION_STEP,
    "on_predict_end": signs.EPOCH_END,
}


class _Phases(keras.callbacks.Callback):
    async_safe = True  # Keras need not wait for a step's logs.

    def __init__(self, phases: Mapping[str, str]) -> None:
        super().__init__()
        for hook, phase in phases.items():
            setattr(self, hook, functools.partial(self._report, phase))

    def _report(self, phase: str, *given: Any, **logs: object) -> None:
        num_steps = (self.params or {}).get("steps")
        # A step's hook is given its batch.
        if phase == signs.STEP and num_steps and given[0] + 1 >= num_steps:
            phase = signs.EPOCH_END
        signs.own().say(phase)


@contextlib.contextmanager
def reported(arguments: dict[str, Any]) -> Iterator[None]:
    """Reports the progress of one call of `fit`, `evaluate` or `predict`.

    The `callbacks` among the call's `arguments` are replaced, unless they are
    the `CallbackList` with which `fit` calls `evaluate`.
    """
    reporter = signs.own()
    callbacks = arguments.get("callbacks")
    if not reporter.is_heard:
        yield
        return
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        given = keras.tree.flatten(callbacks or [])
        arguments["callbacks"] = [
            _Phases(_BEFORE),
            *given,
            _Phases(_AFTER),
        ]
    # One call may be made within another, and may end by an exception.
    with reporter.returning():
        yield
