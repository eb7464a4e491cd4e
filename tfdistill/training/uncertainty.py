"""Weights of losses that are learned, by the uncertainty of each output.

Losses of several outputs have different scales, and fixed weights must be
searched for. Kendall, Gal & Cipolla (CVPR 2018, equation 10) take the loss of
an output for the negative logarithm of a likelihood whose variance is trained
with the model: an output that is hard to predict gets less weight.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill.training import steps

UNCERTAINTY = "uncertainty"


def is_asked(weights: object) -> bool:
    """Whether loss weights, as `compile` takes them, are to be learned."""
    return isinstance(weights, str) and weights == UNCERTAINTY


class LearnedWeight(keras.layers.Layer):
    """The weight of one loss, exp(-s), at the price of s / 2.

    s is the logarithm of the variance, 0 at first. Keras multiplies a loss by
    this as it does by a number. For a squared error, the paper halves the first
    term, which only shifts s.
    """

    def __init__(self, *, name: str, is_regularized: bool) -> None:
        """Makes the variable; call it in the scope of the strategy.

        If it `is_regularized`, s / 2 is among the losses of the model that
        holds it; else the caller adds `cost`.
        """
        super().__init__(name=name, dtype="float32")
        self._log_variance = self.add_weight(
            shape=(),
            initializer="zeros",
            regularizer=_half if is_regularized else None,
            name="log_variance",
        )
        self.built = True

    @property
    def value(self) -> tf.Tensor:
        """What the loss is multiplied by now, a float32 scalar."""
        return tf.exp(-tf.convert_to_tensor(self._log_variance.value))

    @property
    def cost(self) -> tf.Tensor:
        """What is added to the loss for it, a float32 scalar."""
        return _half(tf.convert_to_tensor(self._log_variance.value))

    def __tf_tensor__(
        self, dtype: tf.DType | None = None, name: str | None = None
    ) -> tf.Tensor:
        """Returns `value`: for TensorFlow, this is a tensor."""
        return self.value if dtype is None else tf.cast(self.value, dtype)


def _half(log_variance: tf.Tensor) -> Any:
    return log_variance / 2


# By name in the logs.
LearnedWeights = dict[str, LearnedWeight]


def of_task(
    losses: object,
    model: keras.Model,
    learned: LearnedWeights,
    *,
    has_own_loss: bool,
) -> Any:
    """Returns weights of the losses of a model's task; see `by_output`.

    A ValueError if it has its own `compute_loss`.
    """
    if has_own_loss:
        raise ValueError(
            "`loss_weights` must not be learned for a model with its own "
            "`compute_loss`, which may leave out the penalty that keeps "
            f"them from growing; received {type(model).__name__}. "
            "Learn the weights in `compute_loss`."
        )
    names = steps.output_names(model)
    return by_output(losses, names, learned, argument="loss")


def of_distillation(
    losses: object, names: Sequence[str] | None, learned: LearnedWeights
) -> Any:
    """Returns weights of the distillation losses; see `by_output`."""
    is_for_all = not isinstance(losses, Mapping | list | tuple)
    if is_for_all and names:
        losses = dict.fromkeys(names, losses)
    # Their cost is part of the term, which has its own weight.
    return by_output(
        losses,
        names,
        learned,
        argument="distillation_loss",
        is_regularized=False,
    )


def by_output(
    losses: Any,
    names: Sequence[str] | None,
    learned: LearnedWeights,
    *,
    argument: str,
    is_regularized: bool = True,
) -> Any:
    """Returns the weights of losses by output: a dict or list, as these are.

    `names` are the outputs' names, if known; `argument` is the argument of
    `compile` that has the losses. A weight is kept if it was `learned` already,
    else added there. A ValueError if losses are not by output, or in a list
    without names.
    """

    def weight(output: str) -> LearnedWeight:
        name = f"{output}_{argument}_weight"
        if name not in learned:
            learned[name] = LearnedWeight(
                name=name, is_regularized=is_regularized
            )
        learned[name].trainable = True
        return learned[name]

    if isinstance(losses, Mapping):
        return {key: loss and weight(key) for key, loss in losses.items()}
    is_list = isinstance(losses, list | tuple)
    if not is_list or not names or len(names) != len(losses):
        raise ValueError(
            f"Weights that are learned need a `{argument}` by output; received "
            f"{losses!r:.100} and outputs named {names}. Pass a dict, such as "
            f"{argument}={{'click': ..., 'sale': ...}}."
        )
    pairs = zip(names, losses, strict=True)
    return [loss and weight(name) for name, loss in pairs]


def logs(learned: LearnedWeights) -> steps.Logs:
    """Returns the weights that are being learned now, by name."""
    return {n: each.value for n, each in learned.items() if each.trainable}
