"""What a strategy must do for a model; and how replicas and workers do it.

Keras 3's `BatchNormalization` updates its moving mean and variance on every
replica from that replica's rows. They only matter in inference, so they are
averaged over the replicas whenever the student is looked at from outside:
before an export, an evaluation and a file.
"""

import os
import warnings
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdistill import data
from tfdistill.cluster import replicas
from tfdistill.system import keras_internals

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


def _summed_results(model: keras.Model) -> Logs:
    """Results of all metrics from states summed over the replicas."""
    variables = [v for m in model.metrics for v in m.variables]
    # `identity` places the value on this replica's device, without which
    # MultiWorkerMirroredStrategy finds no destination for the sum.
    local = [tf.identity(v.value) for v in variables]
    state = zip(variables, replicas.summed(local), strict=True)
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


def prepare(x: Any, shuffle: Any, strategy: tf.distribute.Strategy) -> Any:
    """Makes all workers read the same batches, each its own rows of them.

    Args:
        x: What `fit`, `evaluate` or `predict` was given as data.
        shuffle: Whether Keras will shuffle arrays.
        strategy: The strategy in use.

    Returns:
        The data to hand on.
    """
    if isinstance(x, tf.data.Dataset):
        return data.by_element(x)
    if shuffle and not isinstance(x, tf.distribute.DistributedDataset):
        _agree_on_seed(strategy)
    return x


def _agree_on_seed(strategy: tf.distribute.Strategy) -> None:
    """Gives all workers the first worker's seed, for Keras' shuffle.

    Keras shuffles arrays with the global seed. Workers that shuffle
    differently train on some examples twice and on others never.
    """
    seed = keras_internals.global_seed()
    own = -1 if seed is None else seed % 2**31
    if own < 0:
        own = int.from_bytes(os.urandom(4), "big") % 2**31
    seeds = replicas.WorkerValues(strategy).gathered(own)
    if len(set(seeds)) == 1 and seed is not None:
        return
    if seed is not None:
        warnings.warn(
            "The workers set different random seeds; the first worker's "
            f"({seeds[0]}) is used by all, so that they shuffle alike. "
            "Call keras.utils.set_random_seed with one seed on all workers.",
            stacklevel=5,
        )
    tf.random.set_seed(seeds[0])


class BatchStatistics:
    """The variables of one model that replicas update on their own."""

    def __init__(
        self, model: keras.Model, strategy: tf.distribute.Strategy
    ) -> None:
        """Finds them: float variables that no optimizer updates.

        Args:
            model: A built model.
            strategy: The strategy that it was made under.
        """
        self._strategy = strategy
        self._variables = [
            variable
            for variable in model.non_trainable_variables
            if tf.as_dtype(variable.dtype).is_floating
            and variable.aggregation in (None, "none")
        ]
        self._average = tf.function(lambda: strategy.run(self._in_replica))

    def average(self) -> None:
        """Gives all replicas the mean of their statistics.

        A collective: every worker of the group calls it at the same step.
        """
        if self._variables and self._strategy.num_replicas_in_sync > 1:
            self._average()

    def _in_replica(self) -> None:
        context = tf.distribute.get_replica_context()
        means = context.all_reduce(
            tf.distribute.ReduceOp.MEAN,
            [tf.identity(variable.value) for variable in self._variables],
        )
        for variable, mean in zip(self._variables, means, strict=True):
            variable.assign(mean)
