"""The optimizers' update rules, dense and by rows.

A variable, or the touched rows of a table, is updated where it lies: what a
step costs follows from its gradient, not from the table.
"""

from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill.cluster import replicas
from tfdistill.system import keras_internals

Slots = Mapping[str, tf.Variable]
Hyperparameters = dict[str, tf.Tensor]


class UpdateRule:
    """How one optimizer changes variables; see `rules.rule_for`."""

    # Initial values of what it keeps for each element, by name.
    slots: dict[str, float] = {}
    # The operations.
    dense: Any = None
    by_rows: Any = None

    def __init__(self, optimizer: keras.optimizers.Optimizer) -> None:
        self._optimizer = optimizer

    def hyperparameters(self, step: Any) -> Hyperparameters:
        """Returns what changes from step to step, float32 scalars by name.

        `step` counts the updates made before this one. A learning rate
        schedule reads `optimizer.iterations` by itself.
        """
        del step  # Most rules know no bias correction.
        return {
            "learning_rate": tf.cast(
                tf.convert_to_tensor(self._optimizer.learning_rate), tf.float32
            )
        }

    def apply_dense(
        self,
        variable: Any,
        slots: Slots,
        grad: Any,
        hyper: Mapping[str, tf.Tensor],
    ) -> None:
        """Updates a whole variable, on its device; slices are made dense."""
        if isinstance(grad, tf.IndexedSlices):
            grad = tf.math.unsorted_segment_sum(
                grad.values, grad.indices, variable.shape[0]
            )
        self._update(variable, slots, hyper, grad)

    def apply_rows(
        self,
        variable: Any,
        slots: Slots,
        rows: tf.Tensor,
        grads: tf.Tensor,
        hyper: Mapping[str, tf.Tensor],
    ) -> None:
        """Updates some rows, on the variable's device; others stay as is.

        `rows` are integers `[n]`, all different, and `grads` `[n, dim]`.
        """
        self._update(variable, slots, hyper, grads, rows)

    def _update(
        self,
        variable: Any,
        slots: Slots,
        hyper: Mapping[str, tf.Tensor],
        grad: tf.Tensor,
        *rows: tf.Tensor,
    ) -> None:
        """Updates a variable, or the given rows, on its device."""
        update = self._rows if rows else self._dense
        dtype = variable.dtype
        cast = {name: tf.cast(value, dtype) for name, value in hyper.items()}
        handles = {name: slot.handle for name, slot in slots.items()}
        with tf.device(variable.device):
            update(variable.handle, handles, cast, tf.cast(grad, dtype), *rows)

    def _arguments(self, var: Any, slots: Any, hyper: Any, grad: Any) -> Any:
        """Returns what the operations `dense` and `by_rows` both take."""
        raise NotImplementedError

    def _dense(self, var: Any, slots: Any, hyper: Any, grad: Any) -> None:
        self.dense(**self._arguments(var, slots, hyper, grad))

    def _rows(
        self, var: Any, slots: Any, hyper: Any, grad: Any, rows: Any
    ) -> None:
        arguments = self._arguments(var, slots, hyper, grad)
        self.by_rows(**arguments, indices=rows)


class Descent(UpdateRule):
    """Gradient descent."""

    def _dense(self, var: Any, slots: Any, hyper: Any, grad: Any) -> None:
        tf.raw_ops.ResourceApplyGradientDescent(
            var=var, alpha=hyper["learning_rate"], delta=grad
        )

    def _rows(
        self, var: Any, slots: Any, hyper: Any, grad: Any, rows: Any
    ) -> None:
        tf.raw_ops.ResourceScatterSub(
            resource=var, indices=rows, updates=hyper["learning_rate"] * grad
        )


class Momentum(UpdateRule):
    """Descent with momentum, Nesterov's too, by Keras' formula."""

    dense = staticmethod(tf.raw_ops.ResourceApplyKerasMomentum)
    by_rows = staticmethod(tf.raw_ops.ResourceSparseApplyKerasMomentum)
    slots = {"momentum": 0.0}

    def _arguments(self, var: Any, slots: Any, hyper: Any, grad: Any) -> Any:
        return {
            "var": var,
            "accum": slots["momentum"],
            "lr": hyper["learning_rate"],
            "grad": grad,
            "momentum": tf.cast(self._optimizer.momentum, grad.dtype),
            "use_nesterov": self._optimizer.nesterov,
        }


class Adagrad(UpdateRule):
    """Adagrad (Duchi et al. 2011)."""

    dense = staticmethod(tf.raw_ops.ResourceApplyAdagradV2)
    by_rows = staticmethod(tf.raw_ops.ResourceSparseApplyAdagradV2)

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        # Keras divides by sqrt(accumulator + epsilon), the operation by
        # sqrt(accumulator) + epsilon: so epsilon goes into the accumulator.
        initial = optimizer.initial_accumulator_value + optimizer.epsilon
        self.slots = {"accumulator": initial}

    def _arguments(self, var: Any, slots: Any, hyper: Any, grad: Any) -> Any:
        return {
            "var": var,
            "accum": slots["accumulator"],
            "lr": hyper["learning_rate"],
            "epsilon": tf.zeros([], grad.dtype),
            "grad": grad,
        }


class Adam(UpdateRule):
    """Adam; on rows its lazy form, for which there is no one operation."""

    slots = {"m": 0.0, "v": 0.0}

    def hyperparameters(self, step: Any) -> Hyperparameters:
        """Adds the powers that correct the bias of the moments."""
        exponent = tf.cast(step, tf.float32) + 1.0
        return {
            **super().hyperparameters(step),
            "beta_1_power": tf.pow(self._optimizer.beta_1, exponent),
            "beta_2_power": tf.pow(self._optimizer.beta_2, exponent),
        }

    def _dense(self, var: Any, slots: Any, hyper: Any, grad: Any) -> None:
        optimizer = self._optimizer
        tf.raw_ops.ResourceApplyAdam(
            var=var,
            m=slots["m"],
            v=slots["v"],
            beta1_power=hyper["beta_1_power"],
            beta2_power=hyper["beta_2_power"],
            lr=hyper["learning_rate"],
            beta1=tf.cast(optimizer.beta_1, grad.dtype),
            beta2=tf.cast(optimizer.beta_2, grad.dtype),
            epsilon=tf.cast(optimizer.epsilon, grad.dtype),
            grad=grad,
        )

    def _rows(
        self, var: Any, slots: Any, hyper: Any, grad: Any, rows: Any
    ) -> None:
        def moved(slot: Any, target: tf.Tensor, beta: float) -> tf.Tensor:
            before = tf.raw_ops.ResourceGather(
                resource=slot, indices=rows, dtype=grad.dtype
            )
            after = before + (target - before) * (1.0 - beta)
            tf.raw_ops.ResourceScatterUpdate(
                resource=slot, indices=rows, updates=after
            )
            return after

        m = moved(slots["m"], grad, self._optimizer.beta_1)
        v = moved(slots["v"], tf.square(grad), self._optimizer.beta_2)
        correction = tf.sqrt(1.0 - hyper["beta_2_power"]) / (
            1.0 - hyper["beta_1_power"]
        )
        rate = hyper["learning_rate"] * correction
        change = m * rate / (tf.sqrt(v) + self._optimizer.epsilon)
        tf.raw_ops.ResourceScatterSub(
            resource=var, indices=rows, updates=change
        )


class Ftrl(UpdateRule):
    """FTRL-proximal (McMahan et al. 2013)."""

    dense = staticmethod(tf.raw_ops.ResourceApplyFtrlV2)
    by_rows = staticmethod(tf.raw_ops.ResourceSparseApplyFtrlV2)

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        initial = optimizer.initial_accumulator_value
        self.slots = {"accumulator": initial, "linear": 0.0}

    def _arguments(self, var: Any, slots: Any, hyper: Any, grad: Any) -> Any:
        optimizer, rate = self._optimizer, hyper["learning_rate"]
        return {
            "var": var,
            "accum": slots["accumulator"],
            "linear": slots["linear"],
            "grad": grad,
            "lr": rate,
            "l1": tf.cast(optimizer.l1_regularization_strength, grad.dtype),
            "l2": optimizer.l2_regularization_strength
            + optimizer.beta / (2.0 * rate),
            "l2_shrinkage": tf.cast(
                optimizer.l2_shrinkage_regularization_strength, grad.dtype
            ),
            "lr_power": tf.cast(optimizer.learning_rate_power, grad.dtype),
        }


class ByKeras(UpdateRule):
    """The optimizer's own update, of values in the place of variables.

    Changes are added, so that nothing is lost of what two workers add at once.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)

        def make() -> keras_internals.UpdateStep:
            return keras_internals.UpdateStep(optimizer)

        self._step = replicas.outside_scopes(make)
        self.slots = self._step.slots

    def hyperparameters(self, step: Any) -> Hyperparameters:
        """Adds the number of updates, and the product of Nadam's momenta."""
        found = super().hyperparameters(step)
        found["iterations"] = iterations = tf.cast(step, tf.float32)
        if isinstance(self._optimizer, keras.optimizers.Nadam):
            steps = tf.range(1.0, _MOST_NADAM_STEPS + 1)
            factors = 1.0 - 0.5 * tf.pow(0.96, steps)
            done = tf.where(steps <= iterations + 1.0, factors, 1.0)
            power = tf.pow(self._optimizer.beta_1, iterations + 1.0)
            found["u_product"] = tf.reduce_prod(done) * power
        return found

    def _update(
        self,
        variable: Any,
        slots: Slots,
        hyper: Mapping[str, tf.Tensor],
        grad: tf.Tensor,
        *rows: tf.Tensor,
    ) -> None:
        targets = [variable, *(slots[name] for name in self.slots)]
        with tf.device(variable.device):
            before = [
                tf.gather(target, *rows)
                if rows
                else tf.convert_to_tensor(target)
                for target in targets
            ]
            grad = tf.cast(grad, variable.dtype)
            after = self._step(variable, before, grad, hyper)
            for target, new, old in zip(targets, after, before, strict=True):
                if rows:
                    tf.raw_ops.ResourceScatterAdd(
                        resource=target.handle,
                        indices=rows[0],
                        updates=new - old,
                    )
                else:
                    tf.raw_ops.AssignAddVariableOp(
                        resource=target.handle, value=new - old
                    )


# From then on 0.96 to the power of the step is 0 in float32.
_MOST_NADAM_STEPS = 500
# Exact classes: a subclass may update otherwise. Each updates an element by
# its own gradient alone; `Muon`, `Lamb` and `Adafactor` look at whole rows.
_RULES: dict[type, type[UpdateRule]] = {
    keras.optimizers.SGD: Descent,
    keras.optimizers.Adagrad: Adagrad,
    keras.optimizers.Adam: Adam,
    keras.optimizers.Ftrl: Ftrl,
    **dict.fromkeys(
        (
            keras.optimizers.Adadelta,
            keras.optimizers.Adamax,
            keras.optimizers.AdamW,
            keras.optimizers.Lion,
            keras.optimizers.Nadam,
            keras.optimizers.RMSprop,
        ),
        ByKeras,
    ),
}
# What a row needs that isn't in the batch, or a step that isn't an update.
_UNSUPPORTED = ("use_ema", "gradient_accumulation_steps", "loss_scale_factor")


def rule_for(
    optimizer: keras.optimizers.Optimizer, *, has_tables: bool = True
) -> UpdateRule:
    """Returns how a Keras optimizer updates variables, and rows of them.

    For optimizers of `keras.optimizers` that update each element by itself, by
    a fused operation where there is one; ValueError for others, and for options
    that are not supported. Dense updates equal Keras' own to float32 tolerance.
    Updates of rows are lazy: other rows stay as they are, with their momentum
    and moments and without weight decay. Bias is corrected by the global step.
    Without tables, the reason for it is that variables are on servers.
    """
    where, remedy = "With parameter servers", "train without servers"
    if has_tables:
        where = "With sharded tables, such as a ShardedEmbedding"
        remedy = "use a keras.layers.Embedding without servers"
    if type(optimizer) not in _RULES:
        names = ", ".join(sorted(cls.__name__ for cls in _RULES))
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
    if optimizer.weight_decay or getattr(optimizer, "amsgrad", False):
        return ByKeras(optimizer)  # Fused operations have neither.
    if isinstance(optimizer, keras.optimizers.SGD) and optimizer.momentum:
        return Momentum(optimizer)
    return _RULES[type(optimizer)](optimizer)


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
    if optimizer.clipvalue and optimizer.clipvalue > 0:
        limit = optimizer.clipvalue
        return [
            _mapped(g, lambda v: tf.clip_by_value(v, -limit, limit))
            for g in gradients
        ]
    if optimizer.global_clipnorm and optimizer.global_clipnorm > 0:
        scale = _global_scale(_norm(gradients), optimizer.global_clipnorm)
        return [_scaled(g, scale) for g in gradients]
    if not (optimizer.clipnorm and optimizer.clipnorm > 0):
        return list(gradients)
    keys = [
        index if group is None else (group,)
        for index, group in enumerate(groups or [None] * len(gradients))
    ]
    members: dict[Any, list[Any]] = {}
    for key, gradient in zip(keys, gradients, strict=True):
        members.setdefault(key, []).append(gradient)
    limit = optimizer.clipnorm
    scales = {
        key: limit / tf.maximum(_norm(members[key]), limit) for key in members
    }
    return [
        _scaled(g, scales[key]) for key, g in zip(keys, gradients, strict=True)
    ]


def _global_scale(norm: tf.Tensor, limit: float) -> tf.Tensor:
    scale = limit * tf.minimum(1.0 / norm, 1.0 / limit)
    # As in Keras: a norm that is not finite makes all gradients NaN.
    return scale + (norm - norm)


def _norm(gradients: Sequence[Any]) -> tf.Tensor:
    """Norm of all values of several gradients, a float32 scalar."""
    values = [
        g.values if isinstance(g, tf.IndexedSlices) else g
        for g in gradients
        if g is not None
    ]
    squares = [_sum_of_squares(value) for value in values]
    return tf.sqrt(tf.add_n(squares)) if squares else tf.zeros([])


def _sum_of_squares(value: tf.Tensor) -> tf.Tensor:
    # Where the gradient is, which may be on a server.
    with tf.device(value.device):
        return tf.reduce_sum(tf.square(tf.cast(value, tf.float32)))


def _scaled(gradient: Any, scale: tf.Tensor) -> Any:
    return _mapped(gradient, lambda v: v * tf.cast(scale, v.dtype))


def _mapped(gradient: Any, function: Any) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        with tf.device(gradient.values.device):
            values = function(gradient.values)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return function(gradient)


def make_slots(
    rule: UpdateRule,
    variables: Sequence[Any],
    strategy: tf.distribute.Strategy,
) -> list[dict[str, tf.Variable]]:
    """Makes what a rule keeps for each variable, by name, beside that variable.

    The variables are `tf.Variable`s made in the strategy's scope.
    """
    return [
        {
            name: _slot_beside(variable, strategy, name, initial)
            for name, initial in rule.slots.items()
        }
        for variable in variables
    ]


def _slot_beside(
    variable: Any, strategy: tf.distribute.Strategy, name: str, initial: float
) -> tf.Variable:
    with strategy.scope(), strategy.extended.colocate_vars_with(variable):
        return tf.Variable(
            lambda: tf.fill(variable.shape, tf.cast(initial, variable.dtype)),
            trainable=False,
            name=name,
        )
