"""One epoch after the other of scheduled training steps."""

import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistill import executions
from tfdistill import fit_arguments
from tfdistill import metric_totals
from tfdistill import progress
from tfdistill import remote_step
from tfdistill import train_function
from tfdistill import training_state
from tfdistill import worker_data

Logs = dict[str, Any]


class TrainingEpochs:
    """Schedules training steps and reports them as they are done."""

    def __init__(
        self,
        model: keras.Model,
        step: remote_step.RemoteStep,
        data: worker_data.WorkerData,
        window: executions.Executions,
        *,
        num_workers: int,
        steps_per_epoch: int | None,
        state: training_state.TrainingState,
        backups: Sequence[Any],
    ) -> None:
        """Traces nothing yet.

        Args:
            model: A built and compiled model.
            step: Its step on a worker.
            data: What the workers read.
            window: Runs the steps.
            num_workers: Number of workers.
            steps_per_epoch: Steps an epoch; None for all that the data hold.
            state: What changes in training.
            backups: The `backup.Backup`s among the callbacks.

        Raises:
            ValueError: The data never end and no number of steps was given.
        """
        self._model = model
        self._step = step
        self._data = data
        self._window = window
        self._num_workers = num_workers
        self._steps_per_epoch = steps_per_epoch
        self._state = state
        self._backups = list(backups)
        self._endless = data.is_endless()
        if self._endless and steps_per_epoch is None:
            raise ValueError(
                "`steps_per_epoch` must be given where the data repeat "
                "forever; received None."
            )
        self._functions: dict[int, train_function.TrainFunction] = {}
        self._totals = metric_totals.MetricTotals(model)
        self._metric_names = list(self._totals.results())
        self._iterator: Any = None
        # Number of updates done.
        self._global_step = 0
        self._resumed: training_state.TrainingPoint | None = None

    def start(self, initial_epoch: int) -> int:
        """Reads the newest backup, if there is one, and finds where to start.

        Args:
            initial_epoch: What `fit` was given.

        Returns:
            The index of the first epoch.
        """
        iterations = self._model.optimizer.iterations
        for backup in self._backups:
            self._resumed = self._resumed or backup.restore(self._state)
        if self._resumed:
            iterations.assign(self._resumed.step)
        self._global_step = int(iterations.numpy())
        return self._resumed.epoch if self._resumed else initial_epoch

    def run(self, epoch: int, callbacks: keras.callbacks.CallbackList) -> Logs:
        """Trains for one epoch.

        Args:
            epoch: Its index.
            callbacks: Told of each execution once it is done.

        Returns:
            The epoch's logs.
        """
        model, window = self._model, self._window
        done = scheduled = self._begin()
        ended: set[int] = set()
        logs: Logs = {}
        while True:
            is_due = any(backup.wants_quiet for backup in self._backups)
            # Nothing more is wanted of data that have ended everywhere, nor
            # of a training that a callback has stopped.
            while len(window) < window.limit and not (
                is_due or model.stop_training or len(ended) == self._num_workers
            ):
                num_steps = self._num_steps(scheduled)
                if not num_steps:
                    break
                self._schedule(num_steps, scheduled - done)
                scheduled += num_steps
            if not len(window):
                if not is_due:
                    break
                self.back_up(epoch, done)
                continue
            asked, result = self._oldest()
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
        self._end(done)
        return logs

    def _begin(self) -> int:
        """Returns how many of the epoch's steps are done already."""
        self._totals.reset()
        if self._iterator is None or not self._endless:
            self._iterator = self._data.iterator()
        resumed, self._resumed = self._resumed, None
        if resumed is None:
            return 0
        if resumed.metric_sums:
            self._totals.add(np.asarray(resumed.metric_sums))
        return resumed.batch

    def back_up(self, epoch: int, done: int) -> None:
        """Lets those who wait for quiet have it; nothing is in flight.

        Args:
            epoch: Index of the epoch in progress.
            done: Number of its steps done.
        """
        point = training_state.TrainingPoint(
            step=self._global_step,
            epoch=epoch,
            batch=done,
            metric_sums=tuple(self._totals.sums.tolist()) if done else (),
        )
        # Storage may be slow; no step is late meanwhile.
        with progress.own().returning():
            progress.own().say(progress.CALLBACKS)
            for backup in self._backups:
                if backup.wants_quiet:
                    backup.on_quiet(point, self._state)

    def _num_steps(self, scheduled: int) -> int:
        """Steps of the next execution: fewer at the end of the epoch."""
        wanted = int(self._model.steps_per_execution)
        if self._steps_per_epoch is None:
            return wanted
        return min(wanted, self._steps_per_epoch - scheduled)

    def _schedule(self, num_steps: int, ahead: int) -> None:
        if num_steps not in self._functions:
            self._functions[num_steps] = train_function.TrainFunction(
                self._model,
                self._step,
                self._totals,
                num_steps=num_steps,
                endless=self._endless,
                metric_names=self._metric_names,
            )
        function = self._functions[num_steps]
        first_step = tf.constant(self._global_step + ahead, tf.int64)
        self._window.schedule(
            function.function,
            (
                self._iterator,
                first_step,
                self._model.execution_arguments(),
            ),
            tag=num_steps,
        )

    def _oldest(self) -> tuple[int, train_function.TrainResult]:
        num_steps, vector = self._window.oldest()
        return num_steps, self._functions[num_steps].result(vector)

    def _note(self, result: train_function.TrainResult) -> Logs:
        self._global_step += result.num_steps
        self._totals.add(result.added)
        self._model.note_report(result.report)
        self._model.examples_of_last_execution = result.num_examples
        shown = self._model.shown_logs(result.logs)
        return {**self._totals.results(), **shown}

    def _end(self, done: int) -> None:
        """Leaves the counters as callbacks and users expect to find them."""
        self._model.optimizer.iterations.assign(self._global_step)
        self._totals.assign()
        wanted = self._steps_per_epoch
        if wanted and done < wanted and not self._model.stop_training:
            warnings.warn(
                f"The data ended after {done} of {wanted} steps of the epoch. "
                "Repeat them (`dataset.repeat()`) or lower `steps_per_epoch`.",
                stacklevel=4,
            )
