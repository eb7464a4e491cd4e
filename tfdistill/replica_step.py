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
    strategy = model.distribute_strategy

    def first_of_replicas(logs: Logs) -> Logs:
        return {
            key: strategy.experimental_local_results(value)[0]
            for key, value in logs.items()
        }

    def run(data: Any) -> Logs:
        return first_of_replicas(strategy.run(step, args=(data,)))

    @tf.autograph.experimental.do_not_convert
    def execute(iterator: Any) -> Logs:
        logs = run(iterator.get_next())
        if model.steps_per_execution > 1:
            logs = _repeat(run, logs, iterator, model.steps_per_execution)
        summed = strategy.run(lambda: _summed_results(model))
        return {key: summed.get(key, logs[key]) for key in logs}

    if not model.run_eagerly:
        execute = tf.function(
            execute, reduce_retracing=True, jit_compile=model.jit_compile
        )
    return lambda iterator: first_of_replicas(execute(iterator))


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
        data = iterator.get_next_as_optional()
        return tf.cond(
            data.has_value(),
            lambda: (step + 1, run(data.get_value())),
            lambda: (tf.constant(steps), logs),
        )

    _, logs = tf.while_loop(more, body, (tf.constant(1), logs))
    return logs
