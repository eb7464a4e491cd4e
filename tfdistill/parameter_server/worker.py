"""What a worker runs in one call: training steps, or a share of an evaluation.

It returns one flat vector, which travels to the coordinator in one message.

A call reads one share of the data from its start to its end, so it can be run
again elsewhere if its worker is lost.

The step is a pure function of values: dense variables are read in packets
before it, metric states are handed in and out, and Keras sees all of them
through a `keras.StatelessScope`. So nothing is read twice over the network,
and no metric is ever updated by two workers at once. What a step assigns is
written back after it (`variables.StepScope`). Only the tables of
`ShardedEmbedding` are looked up where they are.
"""

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistill.embedding import sources
from tfdistill.parameter_server import fetching
from tfdistill.parameter_server import metric_totals
from tfdistill.parameter_server import variables
from tfdistill.parameter_server import worker_data
from tfdistill.training import steps

Logs = steps.Logs


class RemoteStep:
    """Runs a model's steps on values: train, test, predict."""

    def __init__(
        self,
        model: keras.Model,
        variables: variables.RemoteVariables,
        reading: fetching.Fetching | None = None,
    ) -> None:
        """Takes how training comes by what it reads, if it is to train."""
        self._model = model
        self._variables = variables
        self.fetching = reading or fetching.Fetching(variables)

    def train(
        self, data: object, *, step: tf.Tensor, metrics: Sequence[tf.Tensor]
    ) -> tuple[list[tf.Tensor], Logs]:
        """Reads all dense variables, runs one training step and updates.

        `step` is the step's own number, int64. `metrics` are the states of the
        metrics before the step; those after it are returned, with the logs.
        """
        found = self._variables
        values, scalars = self.fetching.next()
        mapping = [
            *zip([*found.trainable, *found.others], values, strict=True),
            *zip(found.metrics, metrics, strict=True),
            *zip(found.optimizer, scalars, strict=True),
            (found.iterations, tf.cast(step, found.iterations.dtype)),
        ]
        with (
            sources.rows_from(self.fetching.lookups()),
            variables.StepScope(mapping, found.trainable) as scope,
        ):
            logs = self._model.train_step(data)
        # Trained variables were assigned before: see `RemoteUpdate.apply`.
        self.fetching.assigned(found.assign(scope, found.others, values))
        return [scope.get_current_value(v) for v in found.metrics], logs

    def read(self) -> list[tf.Tensor]:
        """Reads the model's dense variables."""
        return self._variables.read()[0]

    def test(
        self,
        data: object,
        *,
        values: Sequence[tf.Tensor],
        metrics: Sequence[tf.Tensor],
    ) -> tuple[list[tf.Tensor], list[tf.Tensor], list[str]]:
        """Runs one evaluation step on what `read` gave.

        Returns the states of the metrics and what `read` would give after it,
        and the names of its logs.
        """
        found = self._variables.metrics
        states = list(zip(found, metrics, strict=True))
        logs, scope, values = self._run(
            self._model.test_step, data, values, states
        )
        after = [scope.get_current_value(v) for v in found]
        return after, values, list(steps.flat(logs))

    def predict(
        self, data: object, *, values: Sequence[tf.Tensor]
    ) -> tuple[Any, list[tf.Tensor]]:
        """Runs inference on what `read` gave; returns that after it, too."""
        found, _, values = self._run(self._model.predict_step, data, values, [])
        return found, values

    def _run(
        self,
        step: Callable[[Any], Any],
        data: object,
        values: Sequence[tf.Tensor],
        states: Sequence[Any],
    ) -> tuple[Any, variables.StepScope, list[tf.Tensor]]:
        known = self._variables
        dense = [*known.trainable, *known.others]
        mapping = [*zip(dense, values, strict=True), *states]
        with variables.StepScope(mapping, known.trainable) as scope:
            found = step(data)
        known.assign(scope, dense, values)
        return found, scope, [scope.get_current_value(v) for v in dense]


def _joined(data: object, *beside: tf.data.Iterator) -> Any:
    """Returns an element of the data, with the next rows beside it."""
    rows = [each.get_next_as_optional().get_value() for each in beside]
    return steps.WithRows(data, *rows) if rows else data


def _nothing() -> tf.Tensor:
    return tf.zeros([0], tf.float64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What one execution did."""

    num_steps: int  # Fewer than asked for if the data ended.
    num_examples: float
    worker: int
    logs: dict[str, Any]  # From the last step, without the metrics.
    added: np.ndarray  # To the metrics, for `MetricTotals.add`.


class TrainFunction:
    """Runs some training steps in one call on a worker."""

    def __init__(
        self,
        step: RemoteStep,
        totals: metric_totals.MetricTotals,
        *,
        with_each_step: steps.WithEachStep | None,
        num_steps: int,
        endless: bool,
    ) -> None:
        """Traces nothing yet.

        `with_each_step` passes the state of a model's teachers to each
        execution; None without teachers.

        If the data never end (`endless`), the steps are unrolled, which spares
        servers and workers a message for each turn of a loop (85k against 63k
        examples/s). Logs that are named as a metric come from `totals`, which
        must be built.
        """
        self._step = step
        self._totals = totals
        self._with_each_step = with_each_step
        self._num_steps = num_steps
        self._run = self._unrolled if endless else self._loop
        self._metric_names = set(totals.results())
        # By name the shapes of what a step logs, which a vector leaves out.
        # Only a trace of the step shows them, and all traces show the same.
        self._log_shapes: dict[str, list[int]] = {}
        self.function = tf.function(self._execute, autograph=False)

    def _execute(
        self,
        iterator: tf.data.Iterator,
        first_step: tf.Tensor,
        arguments: tf.Tensor,
        *beside: tf.data.Iterator,
    ) -> tf.Tensor:
        if self._with_each_step is not None:
            self._with_each_step.on_worker(arguments)
        return self._run(iterator, first_step, *beside)

    def result(self, vector: tf.Tensor) -> TrainResult:
        """Unpacks what a call returned."""
        values = vector.numpy()
        num_steps, num_examples, index, num_logs = values[:4]
        _, logs, added = np.split(values, [4, 4 + int(num_logs)])
        return TrainResult(
            num_steps=int(num_steps),
            num_examples=float(num_examples),
            worker=int(index),
            logs=self._unpacked(logs),
            added=added,
        )

    def _one(
        self, data: object, step: tf.Tensor, states: Sequence[tf.Tensor]
    ) -> tuple[Any, tf.Tensor, tf.Tensor]:
        """Returns metric states, examples, and the logs as a vector."""
        before = list(map(tf.identity, states))
        states, logs = self._step.train(data, step=step, metrics=before)
        self._totals.traced(before, states)
        examples = logs.pop(steps.EXAMPLES, None)
        if examples is None:
            examples = worker_data.num_rows(data)
        logs = steps.flat(logs)
        kept = {k: v for k, v in logs.items() if k not in self._metric_names}
        values = [tf.cast(value, tf.float64) for value in kept.values()]
        self._log_shapes = {
            name: [-1 if size is None else size for size in value.shape]
            for name, value in zip(kept, values, strict=True)
        }
        sizes = [tf.cast(tf.size(value), tf.float64) for value in values]
        flat = [tf.reshape(value, [-1]) for value in values]
        packed = tf.concat([sizes, *flat], 0) if kept else _nothing()
        return states, tf.cast(examples, tf.float64), packed

    def _unpacked(self, packed: np.ndarray) -> Logs:
        """Returns what `_one` packed: floats, and arrays."""
        if not packed.size:  # The data had ended before its first step.
            return {}
        count = len(self._log_shapes)
        parts = np.split(packed[count:], packed[:count].astype(int).cumsum())
        return {
            name: part.reshape(shape) if shape else float(part[0])
            for (name, shape), part in zip(
                self._log_shapes.items(), parts, strict=False
            )
        }

    def _unrolled(
        self,
        iterator: tf.data.Iterator,
        first_step: tf.Tensor,
        *beside: tf.data.Iterator,
    ) -> tf.Tensor:
        states = self._totals.initial()
        total = tf.zeros([], tf.float64)
        logs = _nothing()
        # TensorFlow allows 32 `get_next` in a graph, lest they be a mistake.
        batches = [
            _joined(iterator.get_next_as_optional().get_value(), *beside)
            for _ in range(self._num_steps)
        ]
        self._step.fetching.begin_fetch(batches)
        for index, batch in enumerate(batches):
            states, examples, logs = self._one(
                batch, first_step + index, states
            )
            total += examples
        return self._packed(tf.constant(self._num_steps), total, logs, states)

    def _loop(
        self,
        iterator: tf.data.Iterator,
        first_step: tf.Tensor,
        *beside: tf.data.Iterator,
    ) -> tf.Tensor:
        """The same for data that may end."""

        def more(index: tf.Tensor, goes_on: tf.Tensor, *_: object) -> tf.Tensor:
            return goes_on & (index < self._num_steps)

        def body(
            index: tf.Tensor,
            goes_on: tf.Tensor,
            total: tf.Tensor,
            logs: tf.Tensor,
            states: Sequence[tf.Tensor],
        ) -> Any:
            element = iterator.get_next_as_optional()

            def run() -> Any:
                new, examples, new_logs = self._one(
                    _joined(element.get_value(), *beside),
                    first_step + tf.cast(index, tf.int64),
                    states,
                )
                return index + 1, goes_on, total + examples, new_logs, new

            def stop() -> Any:
                return index, tf.constant(False), total, logs, states

            return tf.cond(element.has_value(), run, stop)

        start = (
            tf.constant(0),
            tf.constant(True),
            tf.zeros([], tf.float64),
            _nothing(),
            self._totals.initial(),
        )
        shapes = list(tf.nest.map_structure(lambda value: value.shape, start))
        shapes[3] = tf.TensorShape([None])  # Only a step shows its logs.
        index, _, total, logs, states = tf.while_loop(
            more, body, start, shape_invariants=tuple(shapes)
        )
        return self._packed(index, total, logs, states)

    def _packed(
        self,
        num_steps: tf.Tensor,
        examples: tf.Tensor,
        logs: tf.Tensor,
        states: Sequence[tf.Tensor],
    ) -> tf.Tensor:
        worker = worker_data.this_worker()
        head = [
            tf.cast(num_steps, tf.float64),
            examples,
            tf.cast(worker, tf.float64),
            tf.cast(tf.size(logs), tf.float64),
        ]
        added = self._totals.added(states)
        return tf.concat([tf.stack(head), logs, added], axis=0)


class EvaluateFunction:
    """Adds up the metrics over a numbered share of some data in one call."""

    def __init__(
        self,
        data: worker_data.TravellingDataset,
        step: RemoteStep,
        totals: metric_totals.MetricTotals,
        *,
        num_shares: int,
        num_batches: int | None = None,
    ) -> None:
        """Traces nothing yet.

        `num_shares` calls make up the whole, of `num_batches` at most if they
        are given. Each reads the model's dense variables once.
        """
        self._data = data
        self._step = step
        self.totals = totals
        self._num_shares = num_shares
        self._num_batches = num_batches
        # Log names of the model's `test_step`; only its trace shows them.
        self.log_names: list[str] = []
        self.function = tf.function(self._evaluate, autograph=False)
        self._test_here = tf.function(
            self._test, autograph=False, reduce_retracing=True
        )

    def _evaluate(self, index: tf.Tensor) -> tf.Tensor:
        dataset = self._data.share(
            index, self._num_shares, num_batches=self._num_batches
        )
        iterator = iter(dataset)

        def turn(
            _: tf.Tensor,
            states: Sequence[tf.Tensor],
            values: Sequence[tf.Tensor],
        ) -> Any:
            element = iterator.get_next_as_optional()

            def run() -> Any:
                return tf.constant(True), *self._test(
                    element.get_value(), states, values
                )

            return tf.cond(
                element.has_value(),
                run,
                lambda: (tf.constant(False), states, values),
            )

        _, states, _ = tf.while_loop(
            lambda goes_on, *_: goes_on,
            turn,
            (tf.constant(True), self.totals.initial(), self._step.read()),
        )
        return self.totals.added(states)

    def _test(
        self,
        batch: object,
        states: Sequence[tf.Tensor],
        values: Sequence[tf.Tensor],
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        before = list(map(tf.identity, states))
        states_after, values_after, self.log_names = self._step.test(
            batch, values=values, metrics=before
        )
        self.totals.traced(before, states_after)
        return states_after, values_after

    def batch_by_batch(self, dataset: tf.data.Dataset) -> tf.Tensor:
        """Adds them up over all of a data set here, in a call for each."""
        states, values = self.totals.initial(), self._step.read()
        for batch in dataset:
            states, values = self._test_here(batch, states, values)
        return self.totals.added(states)
