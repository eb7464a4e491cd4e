"""What a worker does in one call of evaluation or prediction.

A call reads one share of the data from its start to its end, so it can be run
again elsewhere if its worker is lost.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdistill import metric_totals
from tfdistill import remote_step
from tfdistill import worker_data


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

        Args:
            data: What the shares are cut from.
            read: Reads the model's dense variables, once a call.
            num_shares: How many calls make up the whole.
            num_batches: How many batches to read at most. None for all.
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
        step: remote_step.RemoteStep,
        totals: metric_totals.MetricTotals,
        **options: Any,
    ) -> None:
        """Keeps what a call needs; see `ShareFunction` for the rest."""
        super().__init__(data, **options)
        self._step = step
        self.totals = totals
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
        step: remote_step.RemoteStep,
        **options: Any,
    ) -> None:
        """Keeps what a call needs; see `ShareFunction` for the rest."""
        super().__init__(data, **options)
        self._step = step
        self.output_spec = self._traced_outputs()
        self.function = tf.function(self._predict, autograph=False)

    def _traced_outputs(self) -> Any:
        """Traces one batch, to see what the outputs look like."""
        traced = tf.function(
            lambda element: self._step.predict(element, values=self._read()),
            autograph=False,
        ).get_concrete_function(self._data.element_spec)
        return traced.structured_outputs

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
