"""The epoch loop on the coordinator: schedules steps, takes their results.

The coordinator keeps every worker busy with a few executions and takes their
results in the order in which they were scheduled. An execution counts once,
when its result has arrived: one that was cut short by a lost worker is run
again elsewhere, with the same step numbers, and still counts once.
"""

import collections
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistill.cluster import signs
from tfdistill.parameter_server import metric_totals
from tfdistill.parameter_server import worker
from tfdistill.parameter_server import worker_data
from tfdistill.training import auto_steps
from tfdistill.training import fit_arguments
from tfdistill.training import steps

# Enough that a worker finds its next execution waiting, and few enough that
# callbacks see the training as it stands.
IN_FLIGHT_PER_WORKER = 2


class Executions:
    """Schedules functions on the workers and yields what they return."""

    def __init__(
        self,
        coordinator: tf.distribute.coordinator.ClusterCoordinator,
        *,
        num_workers: int,
    ) -> None:
        self.coordinator, self.num_workers = coordinator, num_workers
        self.limit = IN_FLIGHT_PER_WORKER * num_workers
        self._pending: collections.deque[Any] = collections.deque()

    def __len__(self) -> int:
        return len(self._pending)

    def schedule(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        *,
        tag: object = None,
    ) -> None:
        """Schedules one call on any worker; `tag` comes with its result.

        Per-worker iterators may be among the arguments of the `tf.function`.
        """
        result = self.coordinator.schedule(function, args=tuple(args))
        self._pending.append((tag, result))

    def oldest(self) -> tuple[Any, Any]:
        """Waits for the oldest call; returns its tag and its result.

        What a call raised is raised, whichever it was; all others are
        cancelled.
        """
        tag, pending = self._pending.popleft()
        try:
            return tag, pending.get()
        except Exception:
            # It may only have been cancelled for the sake of another: what
            # went wrong first is what `join` raises.
            self._pending.clear()
            self.coordinator.join()
            raise

    def on_each(self, function: Callable[..., Any]) -> Iterator[Any]:
        """Yields what `function` makes of each worker's share of some data."""
        for index in range(self.num_workers):
            self.schedule(function, (tf.constant(index, tf.int64),))
        while self._pending:
            yield self.oldest()[1]

    def cancel(self) -> None:
        """Forgets what is in flight; waits until it has ended.

        An error among it is not raised: another is on its way already.
        """
        self._pending.clear()
        try:
            self.coordinator.join()
        except Exception as error:  # Whatever a user's function raises.
            tf.get_logger().debug("While leaving: %s", error)


class TrainingEpochs:
    """Schedules training steps and reports them as they are done."""

    def __init__(
        self,
        model: keras.Model,
        step: worker.RemoteStep,
        data: worker_data.WorkerData,
        in_flight: Executions,
        *,
        with_each_step: steps.WithEachStep | None,
        last: steps.LastExecution,
        endless: bool,
        steps_per_epoch: int | None,
        backup: Any,
        auto: auto_steps.AutoSteps | None,
        beside: Sequence[Any] = (),
    ) -> None:
        """Traces nothing yet.

        What reads rows `beside` the data is at most one per-worker iterator.
        `steps_per_epoch` is None for all that the data hold. The first epoch
        begins where `backup`, if there is one, resumes. `auto` says how many
        steps an execution has, if the model does not.
        """
        self._model = model
        self._step = step
        self._data = data
        self._in_flight = in_flight
        self._with_each_step = with_each_step
        self._last = last
        self._steps_per_epoch = steps_per_epoch
        self._backup = backup
        self._auto = auto
        self._beside = beside
        self._endless = endless
        if endless and steps_per_epoch is None:
            raise ValueError(
                "`steps_per_epoch` must be given if the data repeat forever; "
                "received None."
            )
        self._functions: dict[int, worker.TrainFunction] = {}
        # Results until every worker has surely run the newest of these.
        self._num_new = 0
        self._totals = metric_totals.MetricTotals(model)
        self._iterator: Any = None
        # Number of updates done.
        self._global_step = 0
        self._resumed = backup and backup.point

    def run(
        self, epoch: int, callbacks: keras.callbacks.CallbackList
    ) -> steps.Logs:
        """Trains for one epoch; returns its logs."""
        model, in_flight = self._model, self._in_flight
        done = scheduled = self._begin(epoch)
        ended: set[int] = set()
        logs: steps.Logs = {}
        while True:
            is_due = self._wants_quiet
            # Nothing more is wanted of data that have ended everywhere, nor
            # of a training that a callback has stopped.
            while len(in_flight) < in_flight.limit and not (
                is_due
                or model.stop_training
                or len(ended) == in_flight.num_workers
            ):
                num_steps = self._num_steps(scheduled, scheduled - done)
                if not num_steps:
                    break
                self._schedule(num_steps, scheduled - done)
                scheduled += num_steps
            if not len(in_flight):
                if not is_due:
                    break
                self.back_up(epoch, done)
                continue
            if self._num_new:
                self._num_new -= 1
                signs.own().say(signs.NEW_GRAPH)
            asked, vector = in_flight.oldest()
            result = self._functions[asked].result(vector)
            if result.num_steps < asked:
                ended.add(result.worker)
                scheduled -= asked - result.num_steps
            if result.num_steps:
                callbacks.on_train_batch_begin(done)
                done += result.num_steps
                logs = self._note(result)
                callbacks.on_train_batch_end(done - 1, logs)
        if not done and not model.stop_training:
            raise fit_arguments.no_batch(epoch)
        self._end()
        return logs

    def _begin(self, epoch: int) -> int:
        """Returns how many of the epoch's steps are done already."""
        self._totals.reset()
        self._global_step = int(self._model.optimizer.iterations.numpy())
        if self._iterator is None or not self._endless:
            self._iterator = self._data.iterator(0 if self._endless else epoch)
        resumed, self._resumed = self._resumed, None
        if resumed is None:
            return 0
        if resumed.metric_sums:
            self._totals.add(np.asarray(resumed.metric_sums))
        return resumed.batch

    @property
    def _wants_quiet(self) -> bool:
        return self._backup is not None and self._backup.is_due

    def back_up(self, epoch: int, done: int) -> None:
        """Takes a backup that is due, with `done` steps of the epoch done.

        Nothing is in flight.
        """
        if not self._wants_quiet:
            return
        point = steps.TrainingPoint(
            step=self._global_step,
            epoch=epoch,
            batch=done,
            metric_sums=tuple(self._totals.sums.tolist()) if done else (),
        )
        # Storage may be slow; no step is late meanwhile.
        with signs.own().returning():
            signs.own().say(signs.CALLBACKS)
            self._model.optimizer.iterations.assign(self._global_step)
            self._backup.on_quiet(point)

    def _num_steps(self, scheduled: int, ahead: int) -> int:
        """Steps of the next execution: fewer at the end of the epoch."""
        if self._auto is None:
            wanted = int(self._model.steps_per_execution)
        else:
            wanted = self._auto.next_count(self._global_step + ahead)
        if self._steps_per_epoch is not None:
            wanted = min(wanted, self._steps_per_epoch - scheduled)
        return wanted if self._auto is None else self._auto.next_size(wanted)

    def _schedule(self, num_steps: int, ahead: int) -> None:
        if num_steps not in self._functions:
            if self._functions:  # It is traced again, which may take long.
                self._num_new = 2 * self._in_flight.limit
                signs.own().say(signs.NEW_GRAPH)
            self._functions[num_steps] = worker.TrainFunction(
                self._step,
                self._totals,
                with_each_step=self._with_each_step,
                num_steps=num_steps,
                endless=self._endless,
            )
        function = self._functions[num_steps]
        sent = (
            self._with_each_step.arguments()
            if self._with_each_step is not None
            else ()
        )
        first_step = tf.constant(self._global_step + ahead, tf.int64)
        self._in_flight.schedule(
            function.function,
            (self._iterator, first_step, sent, *self._beside),
            tag=num_steps,
        )

    def _note(self, result: worker.TrainResult) -> steps.Logs:
        self._global_step += result.num_steps
        self._totals.add(result.added)
        if self._with_each_step is not None:
            self._with_each_step.note()
        shown = self._last.taken_from(result.logs)
        self._last.examples = result.num_examples
        return {**self._totals.results(), **shown}

    def _end(self) -> None:
        """Leaves the counters as callbacks and users expect to find them."""
        self._model.optimizer.iterations.assign(self._global_step)
        self._totals.assign()
