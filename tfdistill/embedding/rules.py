"""The optimizers' updates, dense and by rows, and how gradients are clipped.

A variable, or the touched rows of a table, is updated where it lies: what a
step costs follows from its gradient, not from the table.
"""

import functools
from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill.cluster import replicas
from tfdistill.system import keras_internals

Slots = Mapping[str, tf.Variable]
Hyperparameters = Mapping[str, tf.Tensor]
# From then on 0.96 to the power of the step is 0 in float32.
_MOST_NADAM_STEPS = 500
# Exact classes: a subclass may update otherwise. Each updates an element by
# its own gradient alone; `Muon`, `Lamb` and `Adafactor` look at whole rows.
_OPTIMIZERS = (
    keras.optimizers.Adadelta,
    keras.optimizers.Adagrad,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adamax,
    keras.optimizers.Ftrl,
    keras.optimizers.Lion,
    keras.optimizers.Nadam,
    keras.optimizers.RMSprop,
    keras.optimizers.SGD,
)
# What a row needs that isn't in the batch, or a step that isn't an update.
_UNSUPPORTED = ("use_ema", "gradient_accumulation_steps", "loss_scale_factor")


class UpdateRule:
    """An optimizer's own update, of values in the place of variables.

    For optimizers of `keras.optimizers` that update each element by itself.
    Updates of rows are lazy: other rows stay as they are, with their momentum
    and moments and without weight decay. Bias is corrected by the global step.

    Attributes:
        slots: Initial values of what it keeps for each element, by name.
    """

    def __init__(
        self, optimizer: keras.optimizers.Optimizer, *, has_tables: bool = True
    ) -> None:
        """Makes no variable; see `check`."""
        check(optimizer, has_tables=has_tables)
        self._optimizer = optimizer
        self._step = replicas.outside_scopes(
            lambda: keras_internals.UpdateStep(optimizer)
        )
        is_adam = type(optimizer) is keras.optimizers.Adam and not (
            optimizer.weight_decay or optimizer.amsgrad
        )
        # So they are called in backups.
        names = {"momentum": "m", "velocity": "v"} if is_adam else {}
        self.slots = {names.get(k, k): v for k, v in self._step.slots.items()}

    def make_slots(
        self, variable: tf.Variable, strategy: tf.distribute.Strategy
    ) -> dict[str, tf.Variable]:
        """Makes what it keeps for a variable, by name, beside that variable.

        The `tf.Variable` was made in the strategy's scope.
        """

        def filled(initial: float) -> tf.Tensor:
            return tf.fill(variable.shape, tf.cast(initial, variable.dtype))

        with strategy.scope(), strategy.extended.colocate_vars_with(variable):
            return {
                name: tf.Variable(
                    functools.partial(filled, initial),
                    trainable=False,
                    name=name,
                )
                for name, initial in self.slots.items()
            }

    def hyperparameters(self, step: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns what changes from step to step, float32 scalars by name.

        `step` counts the updates made before this one. A learning rate
        schedule reads `optimizer.iterations` by itself.
        """
        optimizer = self._optimizer
        iterations = tf.cast(step, tf.float32)
        rate = tf.convert_to_tensor(optimizer.learning_rate)
        found = {
            "learning_rate": tf.cast(rate, tf.float32),
            "iterations": iterations,
        }
        if isinstance(optimizer, keras.optimizers.Nadam):
            # The product of its momenta.
            steps = tf.range(1.0, _MOST_NADAM_STEPS + 1)
            factors = 1.0 - 0.5 * tf.pow(0.96, steps)
            done = tf.where(steps <= iterations + 1.0, factors, 1.0)
            power = tf.pow(optimizer.beta_1, iterations + 1.0)
            found["u_product"] = tf.reduce_prod(done) * power
        return found

    def changed(
        self,
        variable: tf.Variable,
        values: Sequence[tf.Tensor],
        grad: tf.Tensor,
        hyper: Hyperparameters,
    ) -> list[tf.Tensor]:
        """Returns new values of a variable, or some rows, and its `slots`.

        The `values` before are in this order; all have the shape of `grad`.
        """
        grad = tf.cast(grad, variable.dtype)
        return self._step(variable, values, grad, hyper)

    def added(
        self,
        variable: tf.Variable,
        values: Sequence[tf.Tensor],
        grad: tf.Tensor | tf.IndexedSlices,
        hyper: Hyperparameters,
    ) -> list[tf.Tensor]:
        """Returns what an update of a whole variable adds to such values.

        Slices `grad` are made dense.
        """
        if isinstance(grad, tf.IndexedSlices):
            grad = tf.math.unsorted_segment_sum(
                grad.values, grad.indices, variable.shape[0]
            )
        after = self.changed(variable, values, grad, hyper)
        return [new - old for new, old in zip(after, values, strict=True)]

    def apply_dense(
        self,
        variable: tf.Variable,
        slots: Slots,
        grad: tf.Tensor | tf.IndexedSlices,
        hyper: Hyperparameters,
    ) -> None:
        """Updates a whole variable, on its device.

        Changes are added, so that nothing is lost of what two workers add.
        """
        targets = [variable, *slots.values()]
        with tf.device(variable.device):
            values = [tf.convert_to_tensor(target) for target in targets]
            added = self.added(variable, values, grad, hyper)
            for target, more in zip(targets, added, strict=True):
                tf.raw_ops.AssignAddVariableOp(
                    resource=target.handle, value=more
                )

    def apply_rows(
        self,
        variable: tf.Variable,
        slots: Slots,
        rows: tf.Tensor,
        grads: tf.Tensor,
        hyper: Hyperparameters,
    ) -> list[Any]:
        """Updates some rows, on the variable's device; others stay as is.

        `rows` are integers `[n]`, all different, and `grads` `[n, dim]`.
        Returned are the operations.
        """
        targets = [variable, *slots.values()]
        with tf.device(variable.device):
            values = [tf.gather(target, rows) for target in targets]
            after = self.changed(variable, values, grads, hyper)
            return [
                tf.raw_ops.ResourceScatterUpdate(
                    resource=target.handle, indices=rows, updates=new
                )
                for target, new in zip(targets, after, strict=True)
            ]

    def in_turns(
        self, variable: tf.Variable, slots: Slots
    ) -> Callable[..., Any]:
        """Returns `apply_rows` of a variable on a server, for many workers.

        A function of rows, gradients and hyperparameters. Each call reads and
        writes before the next one reads, so no update of a row is lost. Were it
        inlined, a worker would hold the lock for as long as messages travel.
        """
        with tf.device(variable.device):
            lock = tf.CriticalSection()

        def update(
            rows: tf.Tensor, grads: tf.Tensor, hyper: Hyperparameters
        ) -> tf.Tensor:
            def change() -> tf.Tensor:
                written = self.apply_rows(variable, slots, rows, grads, hyper)
                with tf.control_dependencies(written):
                    return tf.identity(rows)

            return lock.execute(change)

        return tf.function(
            update,
            autograph=False,
            experimental_attributes={"_noinline": True},
        )


def check(
    optimizer: keras.optimizers.Optimizer, *, has_tables: bool = True
) -> None:
    """Refuses optimizers that cannot update rows, or variables on servers.

    Without tables, the reason for it is that variables are on servers.
    """
    where, remedy = "With parameter servers", "train without servers"
    if has_tables:
        where = "With sharded tables, such as a ShardedEmbedding"
        remedy = "use a keras.layers.Embedding without servers"
    if type(optimizer) not in _OPTIMIZERS:
        names = ", ".join(kind.__name__ for kind in _OPTIMIZERS)
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            remedy = "use mixed_bfloat16, which needs no scaled loss"
        raise ValueError(
            f"{where}, the optimizer must be one of {names} of "
            "keras.optimizers, which update each number by itself; received "
            f"{type(optimizer).__name__}. Choose one of these optimizers, or "
            f"{remedy}."
        )
    for option in _UNSUPPORTED:
        value = getattr(optimizer, option, None)
        if value:
            raise ValueError(
                f"{where}, `{option}` of the optimizer must be unset; received "
                f"{value}. Leave it out, or {remedy}."
            )


def clip(
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[Any],
    groups: Sequence[Hashable] | None = None,
) -> list[Any]:
    """Clips as the optimizer does, without making anything dense.

    Gradients are tensors, None, or indexed slices with distinct rows. By
    `clipnorm`, gradients of one group are clipped by their common norm: give
    the shards of a table the same object. Each None is a separate group.
    """
    limit = optimizer.clipvalue
    if limit and limit > 0:
        return [
            _mapped(g, lambda v: tf.clip_by_value(v, -limit, limit))
            for g in gradients
        ]
    limit = optimizer.global_clipnorm or optimizer.clipnorm
    if not (limit and limit > 0):
        return list(gradients)
    keys: list[Any] = [None] * len(gradients)
    if not optimizer.global_clipnorm:
        keys = [
            index if group is None else (group,)
            for index, group in enumerate(groups or keys)
        ]
    members: dict[Any, list[Any]] = {}
    for key, gradient in zip(keys, gradients, strict=True):
        members.setdefault(key, []).append(gradient)
    scales = {key: _scale(_norm(members[key]), limit) for key in members}
    return [
        _mapped(g, functools.partial(_scaled, scales[key]))
        for key, g in zip(keys, gradients, strict=True)
    ]


def _scale(norm: tf.Tensor, limit: float) -> tf.Tensor:
    scale = limit * tf.minimum(1.0 / norm, 1.0 / limit)
    # As in Keras: a norm that is not finite makes all gradients NaN.
    return scale + (norm - norm)


def _norm(gradients: Sequence[Any]) -> tf.Tensor:
    """Norm of all values of several gradients, a float32 scalar."""
    squares = []
    for g in gradients:
        if g is None:
            continue
        value = g.values if isinstance(g, tf.IndexedSlices) else g
        # Where the gradient is, which may be on a server.
        with tf.device(value.device):
            squares.append(tf.reduce_sum(tf.square(tf.cast(value, tf.float32))))
    return tf.sqrt(tf.add_n(squares)) if squares else tf.zeros([])


def _scaled(scale: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    return value * tf.cast(scale, value.dtype)


def _mapped(
    gradient: tf.Tensor | tf.IndexedSlices | None,
    function: Callable[[tf.Tensor], tf.Tensor],
) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        with tf.device(gradient.values.device):
            values = function(gradient.values)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return function(gradient)
