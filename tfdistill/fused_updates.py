"""Fused updates in the place of a Keras optimizer's own.

One operation updates a variable, or the touched rows of a table, where it
lies: what a step costs follows from its gradient, not from the table.
"""

from collections.abc import Hashable
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill import fused_rules

UpdateRule = fused_rules.UpdateRule

# Exact classes: a subclass may update otherwise.
_RULES: dict[type, type[fused_rules.UpdateRule]] = {
    keras.optimizers.SGD: fused_rules.Descent,
    keras.optimizers.Adagrad: fused_rules.Adagrad,
    keras.optimizers.Adam: fused_rules.Adam,
    keras.optimizers.Ftrl: fused_rules.Ftrl,
}
_UNSUPPORTED = (
    "weight_decay",
    "use_ema",
    "gradient_accumulation_steps",
    "loss_scale_factor",
    "amsgrad",
)


def rule_for(optimizer: keras.optimizers.Optimizer) -> fused_rules.UpdateRule:
    """Returns the fused form of a Keras optimizer's update.

    Dense updates equal Keras' own to float32 tolerance. Updates of rows are
    lazy: momentum and moments of other rows stay as they are, and bias is
    corrected by the global step.

    Args:
        optimizer: `SGD` (with momentum, Nesterov too), `Adagrad`, `Adam` or
            `Ftrl` of `keras.optimizers`.

    Returns:
        The rule; it reads the optimizer's settings when it is called.

    Raises:
        ValueError: Another optimizer, or an option that is not supported.
    """
    if type(optimizer) not in _RULES:
        names = ", ".join(sorted(cls.__name__ for cls in _RULES))
        raise ValueError(
            f"The optimizer must be one of {names} of keras.optimizers, for "
            f"fused updates; received {type(optimizer).__name__}. Choose one "
            "of these, or a model without ShardedEmbedding and parameter "
            "servers."
        )
    for option in _UNSUPPORTED:
        value = getattr(optimizer, option, None)
        if value:
            raise ValueError(
                f"`{option}` of the optimizer must be unset for fused "
                f"updates; received {value}. Leave it out."
            )
    if getattr(optimizer, "momentum", 0):
        return fused_rules.Momentum(optimizer)
    return _RULES[type(optimizer)](optimizer)


def clip(
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[Any],
    groups: Sequence[Hashable] | None = None,
) -> list[Any]:
    """Clips as the optimizer does, without making anything dense.

    Args:
        optimizer: Its `clipnorm`, `global_clipnorm` or `clipvalue` is used.
        gradients: Tensors, None, or indexed slices with distinct rows.
        groups: By `clipnorm`, gradients of one group are clipped by their
            common norm: give the shards of a table the same object. Defaults
            to a group for each gradient, as does None for a single one.

    Returns:
        The clipped gradients.
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
    squares = [tf.reduce_sum(tf.square(tf.cast(v, tf.float32))) for v in values]
    return tf.sqrt(tf.add_n(squares)) if squares else tf.zeros([])


def _scaled(gradient: Any, scale: tf.Tensor) -> Any:
    return _mapped(gradient, lambda v: v * tf.cast(scale, v.dtype))


def _mapped(gradient: Any, function: Any) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            function(gradient.values), gradient.indices, gradient.dense_shape
        )
    return function(gradient)


def make_slots(
    rule: UpdateRule,
    variables: Sequence[Any],
    strategy: tf.distribute.Strategy,
) -> list[dict[str, tf.Variable]]:
    """Makes what a rule keeps for each variable, beside that variable.

    Args:
        rule: The update rule.
        variables: `tf.Variable`s, made in the strategy's scope.
        strategy: The strategy of the variables.

    Returns:
        For each variable, its slots by name.
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
