"""What a worker runs in one call: training steps, or a share of an evaluation.

It returns one flat vector, which travels to the coordinator in one message.

A call reads one share of the data from its start to its end, so it can be run
again elsewhere if its worker is lost.

The step is a pure function of values: dense variables are read in packets
before it, metric states are handed in and out, and Keras sees all of them
through a `keras.StatelessScope`. So nothing is read twice over the network,
and no counter or metric is ever updated by two workers at once. Only the
tables of `ShardedEmbedding` are looked up where they are.
"""

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistill.parameter_server import metric_totals
from tfdistill.parameter_server import variables
from tfdistill.parameter_server import worker_data
from tfdistill.training import steps

Logs = steps.Logs


class RemoteStep:
    """Runs a model's steps on values: train, test, predict."""

    def __init__(
        self, model: Any, variables: variables.RemoteVariables
    ) -> None:
        self._model = model
        self._variables = variables

    def train(
        self, data: Any, *, step: tf.Tensor, metrics: Sequence[tf.Tensor]
    ) -> tuple[list[tf.Tensor], Logs]:
        """Reads all dense variables, runs one training step and updates.

        `step` is the step's own number, int64. `metrics` are the states of the
        metrics before the step; those after it are returned, with the logs.
        """
        found = self._variables
        values, scalars = found.read_with_optimizer()
        mapping = [
            *zip([*found.trainable, *found.others], values, strict=True),
            *zip(found.metrics, metrics, strict=True),
            *zip(found.optimizer, scalars, strict=True),
            (found.iterations, tf.cast(step, found.iterations.dtype)),
        ]
        with keras.StatelessScope(mapping, collect_losses=True) as scope:
            logs = self._model.train_step(data)
        found.assign_others(scope, values[len(found.trainable) :])
        return [scope.get_current_value(v) for v in found.metrics], logs

    def test(
        self,
        data: Any,
        *,
        values: Sequence[tf.Tensor],
        metrics: Sequence[tf.Tensor],
    ) -> tuple[list[tf.Tensor], list[str]]:
        """Runs one evaluation step on what `RemoteVariables.read` gave.

        Returns the states of the metrics after it, and the names of its logs.
        """
        found = self._variables
        mapping = [
            *zip([*found.trainable, *found.others], values, strict=True),
            *zip(found.metrics, metrics, strict=True),
        ]
        with keras.StatelessScope(mapping, collect_losses=True) as scope:
            logs = self._model.test_step(data)
        states = [scope.get_current_value(v) for v in found.metrics]
        return states, list(logs)

    def predict(self, data: Any, *, values: Sequence[tf.Tensor]) -> Any:
        """Runs inference on what `RemoteVariables.read` gave."""
        found = self._variables
        mapping = zip([*found.trainable, *found.others], values, strict=True)
        with keras.StatelessScope(mapping):
            return self._model.predict_step(data)


def _nothing() -> tf.Tensor:
    return tf.zeros([0], tf.float64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What one execution did."""

    num_steps: int  # Fewer than asked for if the data ended.
    num_examples: float
    worker: int
    logs: dict[str, float]  # Of the last step, without the metrics.
    added: np.ndarray  # To the metrics, for `MetricTotals.add`.
    report: np.ndarray  # The rider's.


class TrainFunction:
    """Runs some training steps in one call on a worker."""

    def __init__(
        self,
        step: RemoteStep,
        totals: metric_totals.MetricTotals,
        *,
        rider: Any,
        num_steps: int,
        endless: bool,
        metric_names: Sequence[str],
    ) -> None:
        """Traces nothing yet.

        The `rider` tells each execution of a model's teachers, and hears of
        them from it; None without any.

        If the data never end (`endless`), the steps are unrolled, which spares
        servers and workers a message for each turn of a loop (85k against 63k
        examples/s). Logs that are named as a metric come from `totals`.
        """
        self._step = step
        self._totals = totals
        self._rider = rider
        self._num_steps = num_steps
        self._run = self._unrolled if endless else self._loop
        self._metric_names = set(metric_names)
        # A vector of a step's logs leaves them out. Only a trace of the step
        # shows them, and all traces show the same.
        self._log_names: list[str] = []
        self.function = tf.function(self._execute, autograph=False)

    def _execute(
        self,
        iterator: Any,
        first_step: tf.Tensor,
        arguments: tf.Tensor,
    ) -> tf.Tensor:
        if self._rider is None:
            return self._run(iterator, first_step)
        with self._rider.on_worker(arguments):
            return self._run(iterator, first_step)

    def result(self, vector: tf.Tensor) -> TrainResult:
        """Unpacks what a call returned."""
        values = vector.numpy()
        ends = np.cumsum([3, len(self._log_names), self._totals.size])
        (num_steps, num_examples, index), logs, added, report = np.split(
            values, ends
        )
        return TrainResult(
            num_steps=int(num_steps),
            num_examples=float(num_examples),
            worker=int(index),
            logs=dict(zip(self._log_names, logs.tolist(), strict=True)),
            added=added,
            report=report,
        )

    def _one(
        self, data: Any, step: tf.Tensor, states: Any
    ) -> tuple[Any, tf.Tensor, tf.Tensor]:
        """Returns metric states, examples, and the logs as a vector."""
        states, logs = self._step.train(data, step=step, metrics=states)
        examples = logs.pop(steps.EXAMPLES, None)
        if examples is None:
            examples = worker_data.num_rows(data)
        kept = {k: v for k, v in logs.items() if k not in self._metric_names}
        self._log_names = sorted(kept)
        values = [tf.cast(kept[name], tf.float64) for name in self._log_names]
        packed = tf.reshape(tf.stack(values), [-1]) if values else _nothing()
        return states, tf.cast(examples, tf.float64), packed

    def _unrolled(self, iterator: Any, first_step: tf.Tensor) -> tf.Tensor:
        states = self._totals.initial()
        total = tf.zeros([], tf.float64)
        logs = _nothing()
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
        """Traces a step in a separate graph, to see what it logs."""

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
        report = _nothing() if self._rider is None else self._rider.reported()
        return tf.concat([tf.stack(head), logs, added, report], axis=0)


class ShareFunction:
    """Runs a model over a numbered share of some data in one call."""

    def __init__(
        self,
        data: worker_data.TravellingDataset,
        *,
        read: Callable[[], list[tf.Tensor]],
        num_shares: int,
        num_batches: int | None = None,
    ) -> None:
        """Traces nothing yet.

        `read` reads the model's dense variables, once a call; `num_shares`
        calls make up the whole, of `num_batches` at most if they are given.
        """
        self._data = data
        self._read = read
        self.num_shares = num_shares
        self._num_batches = num_batches

    def loop(
        self, index: tf.Tensor, body: Callable[..., Any], state: Any
    ) -> Any:
        """Runs `state = body(element, values, state)` over a share."""
        values = self._read()
        dataset = self._data.share(
            index, self.num_shares, num_batches=self._num_batches
        )
        iterator = iter(dataset)

        def turn(_: tf.Tensor, state: Any) -> Any:
            element = iterator.get_next_as_optional()
            return tf.cond(
                element.has_value(),
                lambda: (
                    tf.constant(True),
                    body(element.get_value(), values, state),
                ),
                lambda: (tf.constant(False), state),
            )

        return tf.while_loop(
            lambda goes_on, _: goes_on, turn, (tf.constant(True), state)
        )[1]


class EvaluateFunction(ShareFunction):
    """Adds up the metrics over one share of the data."""

    def __init__(
        self,
        data: worker_data.TravellingDataset,
        step: RemoteStep,
        totals: metric_totals.MetricTotals,
        **options: Any,
    ) -> None:
        super().__init__(data, **options)
        self._step = step
        self.totals = totals
        # Of the model's `test_step`; only its trace shows them.
        self.log_names: list[str] = []
        self.function = tf.function(self._evaluate, autograph=False)

    def _evaluate(self, index: tf.Tensor) -> tf.Tensor:
        def body(element: Any, values: Any, states: Any) -> Any:
            states, self.log_names = self._step.test(
                element, values=values, metrics=states
            )
            return states

        states = self.loop(index, body, self.totals.initial())
        return self.totals.added(states)


class PredictFunction(ShareFunction):
    """Collects the outputs for one share of the data."""

    def __init__(
        self,
        data: worker_data.TravellingDataset,
        step: RemoteStep,
        **options: Any,
    ) -> None:
        super().__init__(data, **options)
        self._step = step
        # Traces one batch, to see what the outputs look like.
        self.output_spec = (
            tf.function(
                lambda element: step.predict(element, values=self._read()),
                autograph=False,
            )
            .get_concrete_function(data.element_spec)
            .structured_outputs
        )
        self.function = tf.function(self._predict, autograph=False)

    def _predict(self, index: tf.Tensor) -> Any:
        """Returns each batch's number of rows, and all rows of each output."""
        specs = keras.tree.flatten(self.output_spec)
        arrays = [
            tf.TensorArray(
                spec.dtype,
                0,
                dynamic_size=True,
                infer_shape=False,
                element_shape=[None, *spec.shape[1:]],
            )
            for spec in specs
        ]
        rows = tf.TensorArray(tf.int64, 0, dynamic_size=True, element_shape=[])

        def body(element: Any, values: Any, state: Any) -> Any:
            count, rows, arrays = state
            outputs = keras.tree.flatten(
                self._step.predict(element, values=values)
            )
            num_rows = tf.shape(outputs[0], out_type=tf.int64)[0]
            return (
                count + 1,
                rows.write(count, num_rows),
                [
                    array.write(count, output)
                    for array, output in zip(arrays, outputs, strict=True)
                ],
            )

        _, rows, arrays = self.loop(index, body, (tf.constant(0), rows, arrays))
        return rows.stack(), [array.concat() for array in arrays]
