"""What a worker does in one execution of training steps.

It returns one flat vector, which travels to the coordinator in one message.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistill import metric_totals
from tfdistill import remote_step
from tfdistill import step_details
from tfdistill import worker_data


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What one execution did.

    Attributes:
        num_steps: Steps done; fewer than asked for where the data ended.
        num_examples: Examples in these steps.
        worker: Index of the worker that did them.
        logs: Logs of the last step that are no metrics.
        added: What was added to the metrics, for `MetricTotals.add`.
        report: What the model has to say on the execution.
    """

    num_steps: int
    num_examples: float
    worker: int
    logs: dict[str, float]
    added: np.ndarray
    report: np.ndarray


class TrainFunction:
    """Runs some training steps in one call on a worker."""

    def __init__(
        self,
        model: Any,
        step: remote_step.RemoteStep,
        totals: metric_totals.MetricTotals,
        *,
        num_steps: int,
        endless: bool,
        metric_names: Sequence[str],
    ) -> None:
        """Traces nothing yet.

        Args:
            model: A `ParameterServerTraining` model.
            step: The model's step.
            totals: For the metrics' states.
            num_steps: Steps a call.
            endless: Whether the data never end: then the steps are unrolled,
                which spares servers and workers a message for each turn of a
                loop (85k against 63k examples/s).
            metric_names: Names of logs that come from the metrics.
        """
        self._model = model
        self._step = step
        self._totals = totals
        self._num_steps = num_steps
        self._run = self._unrolled if endless else self._loop
        self._metric_names = set(metric_names)
        self._log_names: list[str] = []
        self.function = tf.function(self._execute, autograph=False)

    def _execute(
        self,
        iterator: Any,
        first_step: tf.Tensor,
        arguments: tf.Tensor,
    ) -> tf.Tensor:
        with self._model.on_worker(arguments):
            return self._run(iterator, first_step)

    def result(self, vector: tf.Tensor) -> TrainResult:
        """Unpacks what a call returned."""
        values = vector.numpy()
        count = len(self._log_names)
        logs = dict(zip(self._log_names, values[3:], strict=False))
        return TrainResult(
            num_steps=int(values[0]),
            num_examples=float(values[1]),
            worker=int(values[2]),
            logs={key: float(value) for key, value in logs.items()},
            added=values[3 + count : 3 + count + self._totals.size],
            report=values[3 + count + self._totals.size :],
        )

    def _one(
        self, data: Any, step: tf.Tensor, states: Any
    ) -> tuple[Any, tf.Tensor, tf.Tensor]:
        """Returns metric states, examples, and the logs as a vector."""
        states, logs = self._step.train(data, step=step, metrics=states)
        examples = logs.pop(step_details.EXAMPLES, None)
        if examples is None:
            examples = worker_data.num_rows(data)
        kept = {k: v for k, v in logs.items() if k not in self._metric_names}
        self._log_names = sorted(kept)
        values = [tf.cast(kept[name], tf.float64) for name in self._log_names]
        return (
            states,
            tf.cast(examples, tf.float64),
            tf.reshape(tf.stack(values), [-1])
            if values
            else tf.zeros([0], tf.float64),
        )

    def _unrolled(self, iterator: Any, first_step: tf.Tensor) -> tf.Tensor:
        states = self._totals.initial()
        total = tf.zeros([], tf.float64)
        logs = tf.zeros([0], tf.float64)
        for index in range(self._num_steps):
            states, examples, logs = self._one(
                iterator.get_next(), first_step + index, states
            )
            total += examples
        return self._packed(tf.constant(self._num_steps), total, logs, states)

    def _loop(self, iterator: Any, first_step: tf.Tensor) -> tf.Tensor:
        """The same for data that may end."""
        num_logs = self._num_logs(iterator, first_step)

        def more(index: tf.Tensor, goes_on: tf.Tensor, *_: Any) -> tf.Tensor:
            return goes_on & (index < self._num_steps)

        def body(
            index: tf.Tensor,
            goes_on: tf.Tensor,
            total: tf.Tensor,
            logs: tf.Tensor,
            states: Any,
        ) -> Any:
            element = iterator.get_next_as_optional()

            def run() -> Any:
                new, examples, new_logs = self._one(
                    element.get_value(),
                    first_step + tf.cast(index, tf.int64),
                    states,
                )
                return index + 1, goes_on, total + examples, new_logs, new

            def stop() -> Any:
                return index, tf.constant(False), total, logs, states

            return tf.cond(element.has_value(), run, stop)

        index, _, total, logs, states = tf.while_loop(
            more,
            body,
            (
                tf.constant(0),
                tf.constant(True),
                tf.zeros([], tf.float64),
                tf.zeros([num_logs], tf.float64),
                self._totals.initial(),
            ),
        )
        return self._packed(index, total, logs, states)

    def _num_logs(self, iterator: Any, step: tf.Tensor) -> int:
        """Traces a step in a graph of its own, to see what it logs."""

        @tf.function(autograph=False)
        def probe(step: tf.Tensor) -> tf.Tensor:
            element = iterator.get_next()
            return self._one(element, step, self._totals.initial())[2]

        probe.get_concrete_function(step)
        return len(self._log_names)

    def _packed(
        self,
        num_steps: tf.Tensor,
        examples: tf.Tensor,
        logs: tf.Tensor,
        states: Any,
    ) -> tf.Tensor:
        worker = worker_data.this_worker()
        head = [
            tf.cast(num_steps, tf.float64),
            examples,
            tf.cast(worker, tf.float64),
        ]
        added = self._totals.added(states)
        report = self._model.execution_report()
        return tf.concat([tf.stack(head), logs, added, report], axis=0)
