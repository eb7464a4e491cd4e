"""One step on every replica, and logs that are the same on all of them."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

Logs = dict[str, Any]


def on_replicas(
    model: keras.Model, step: Callable[[Any], Logs]
) -> Callable[[Any], Logs]:
    """Runs `step` on every replica, `model.steps_per_execution` times.

    Args:
        model: The compiled model.
        step: Runs on one replica's part of the batch and returns its logs.

    Returns:
        What `fit` or `evaluate` calls with an iterator of global batches. It
        returns the last step's logs. Those named as a metric's result are
        taken from states summed over all replicas, the rest from the first
        replica.
    """
    return _Execution(model, step)


class _Execution:
    """Several steps in one call: in one function, or one function each."""

    def __init__(self, model: keras.Model, step: Callable[[Any], Logs]) -> None:
        self._model, self._step = model, step
        self._strategy = model.distribute_strategy
        # Told by the first trace: whether each step is a function's call.
        self._stepwise = False
        self._begin, self._go_on = (
            function
            if model.run_eagerly
            else tf.function(
                function, reduce_retracing=True, jit_compile=model.jit_compile
            )
            for function in map(
                tf.autograph.experimental.do_not_convert,
                (self._first_steps, self._next_step),
            )
        )

    def __call__(self, iterator: Any) -> Logs:
        logs = self._of_first_replica(self._begin(iterator))
        step = tf.constant(1)
        while self._stepwise and step < self._model.steps_per_execution:
            step, logs = self._go_on(iterator, step, logs)
            logs = self._of_first_replica(logs)
        return logs

    def _first_steps(self, iterator: Any) -> Logs:
        steps = self._model.steps_per_execution
        logs = self._run(iterator.get_next())
        self._stepwise = _gathers_in_graph()
        if steps > 1 and not self._stepwise:
            logs = _repeat(self._run, logs, iterator, steps)
        return self._finish(logs)

    def _next_step(self, iterator: Any, step: tf.Tensor, logs: Logs) -> Any:
        step, logs = _step_if_data(
            self._run, iterator, step, logs, self._model.steps_per_execution
        )
        return step, self._finish(logs)

    def _run(self, data: Any) -> Logs:
        return self._of_first_replica(
            self._strategy.run(self._step, args=(data,))
        )

    def _finish(self, logs: Logs) -> Logs:
        summed = self._strategy.run(lambda: _summed_results(self._model))
        return {key: summed.get(key, logs[key]) for key in logs}

    def _of_first_replica(self, logs: Logs) -> Logs:
        return {
            key: self._strategy.experimental_local_results(value)[0]
            for key, value in logs.items()
        }


def _gathers_in_graph() -> bool:
    """Whether the graph being built gathers values of varying size.

    Sparse gradients are gathered, padded to the largest number of rows. A
    collective keeps the shape of its first run until its function returns
    (`CollectiveParamResolverLocal` knows it by instance and step id), so that
    in a loop of steps the second number of rows is an error.
    """
    if tf.executing_eagerly():
        return False
    operations = tf.compat.v1.get_default_graph().get_operations()
    return any(op.type.startswith("CollectiveGather") for op in operations)


def sum_over_replicas(values: list[Any]) -> list[Any]:
    """Sums tensors over the replicas, packed into few collectives.

    Args:
        values: Tensors, indexed slices or None.

    Returns:
        The sums; None stays None.
    """
    present = [value for value in values if value is not None]
    if not present:
        return values
    context = tf.distribute.get_replica_context()
    summed = iter(context.all_reduce(tf.distribute.ReduceOp.SUM, present))
    return [None if value is None else next(summed) for value in values]


def gatherable(value: tf.Tensor) -> tf.Tensor:
    """Casts to the next wider dtype that TensorFlow's collectives take."""
    if value.dtype in (tf.bfloat16, tf.float16):
        return tf.cast(value, tf.float32)
    if value.dtype.is_integer or value.dtype.is_bool:
        return tf.cast(value, tf.int64)
    return value


def _summed_results(model: keras.Model) -> Logs:
    """Results of all metrics from states summed over the replicas."""
    variables = [v for m in model.metrics for v in m.variables]
    # `identity` places the value on this replica's device, without which
    # MultiWorkerMirroredStrategy finds no destination for the sum.
    local = [tf.identity(v.value) for v in variables]
    state = zip(variables, sum_over_replicas(local), strict=True)
    with keras.StatelessScope(state_mapping=state):
        return model.get_metrics_result()


def _repeat(
    run: Callable[[Any], Logs], logs: Logs, iterator: Any, steps: int
) -> Logs:
    """Runs up to `steps - 1` further steps, fewer where the data ends."""

    def more(step: tf.Tensor, _: Logs) -> tf.Tensor:
        return step < steps

    def body(step: tf.Tensor, logs: Logs) -> tuple[tf.Tensor, Logs]:
        return _step_if_data(run, iterator, step, logs, steps)

    _, logs = tf.while_loop(more, body, (tf.constant(1), logs))
    return logs


def _step_if_data(
    run: Callable[[Any], Logs],
    iterator: Any,
    step: tf.Tensor,
    logs: Logs,
    steps: int,
) -> tuple[tf.Tensor, Logs]:
    """Runs one step and counts it; where the data end, counts all steps."""
    data = iterator.get_next_as_optional()
    return tf.cond(
        data.has_value(),
        lambda: (step + 1, run(data.get_value())),
        lambda: (tf.constant(steps), logs),
    )
