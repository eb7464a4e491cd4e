"""LARS, and weight decay of kernels only."""

import functools
import typing
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill.system import keras_internals

__all__ = ["LARS", "with_kernel_decay"]

_Schedule = keras.optimizers.schedules.LearningRateSchedule
# Names of what normalization layers learn, and biases; those of attention and
# of recurrent layers have more than one dimension.
_NOT_KERNELS = ("beta", "bias", "gamma", "scale")

_Base: Any = keras.optimizers.Optimizer if typing.TYPE_CHECKING else object


def is_kernel(variable: Any) -> bool:
    """Whether a Keras variable decays: a kernel or a table of embeddings.

    Biases and the parameters of normalization layers, by their names, and all
    variables with fewer than two dimensions do not.

    Example:
        >>> layer = keras.layers.Dense(2)
        >>> layer.build((None, 3))
        >>> [is_kernel(variable) for variable in layer.variables]
        [True, False]
    """
    return len(variable.shape) > 1 and variable.name not in _NOT_KERNELS


class KernelDecay(_Base):
    """Makes an optimizer's weight decay one of kernels, by a schedule.

    A mixin before an optimizer of Keras, in whose way kernels decay: before
    each update they shrink by learning rate x decay (Loshchilov & Hutter
    2017, arXiv:1711.05101). `weight_decay` may be a schedule of the step.
    """

    # Whether the decay is added to the gradient instead.
    _is_coupled = False

    @property
    def weight_decay(self) -> Any:
        """The decay at this step: None, a float or a float scalar."""
        decay = self._weight_decay
        return decay(self.iterations) if _is_schedule(decay) else decay

    @weight_decay.setter
    def weight_decay(self, decay: Any) -> None:
        # Keras sets and reads this attribute; it knows no schedules here.
        if decay is not None and not _is_schedule(decay) and not decay >= 0:
            raise ValueError(
                "`weight_decay` must be None, a number >= 0 or a schedule; "
                f"received {decay!r}."
            )
        self._weight_decay = decay

    def build(self, variables: Sequence[Any]) -> None:
        """Makes the optimizer's variables, and finds the kernels."""
        if self.built:
            return
        kernels = [is_kernel(variable) for variable in variables]
        self._kernels = frozenset(
            i for i, is_one in enumerate(kernels) if is_one
        )
        super().exclude_from_weight_decay(
            var_list=[
                variable
                for variable, is_one in zip(variables, kernels, strict=True)
                if self._is_coupled or not is_one
            ]
        )
        super().build(variables)

    def exclude_from_weight_decay(
        self, var_list: Any = None, var_names: Any = None
    ) -> None:
        """Refuses: which variables decay follows from what they are."""
        raise ValueError(
            f"The kernels decay in {type(self).__name__}, all of them and "
            "nothing else; received variables to exclude. Use an optimizer of "
            "keras.optimizers to choose others."
        )

    def is_decayed(self, variable: Any) -> bool:
        """Whether a variable of this built optimizer is a kernel."""
        return keras_internals.variable_index(self, variable) in self._kernels

    def get_config(self) -> dict[str, Any]:
        """Returns what makes an equal optimizer; for `from_config`."""
        decay = self._weight_decay
        if _is_schedule(decay):
            decay = keras.optimizers.schedules.serialize(decay)
        return {**super().get_config(), "weight_decay": decay}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Any = None
    ) -> Any:
        """Returns the optimizer that `get_config` has described."""
        config = dict(config)
        if isinstance(config.get("weight_decay"), dict):
            config["weight_decay"] = keras.optimizers.schedules.deserialize(
                config["weight_decay"], custom_objects=custom_objects
            )
        return super().from_config(config, custom_objects=custom_objects)


class CoupledKernelDecay(KernelDecay):
    """Adds decay x kernel to the kernel's clipped gradient: an L2 penalty.

    It passes through the momentum, as in Goyal et al. 2017 (arXiv:1706.02677,
    section 3) and most recipes for SGD: with momentum m, kernels shrink by
    about 1 / (1 - m) times as much as by the same number in Keras' own way.
    """

    _is_coupled = True

    def update_step(
        self, gradient: Any, variable: Any, learning_rate: Any
    ) -> None:
        """Updates one variable on one replica."""
        decay = self.weight_decay
        if decay is not None and self.is_decayed(variable):
            # A table's gradient has few rows, but all of its rows decay.
            gradient = tf.cast(
                tf.convert_to_tensor(gradient), variable.dtype
            ) + tf.cast(decay, variable.dtype) * tf.convert_to_tensor(variable)
        super().update_step(gradient, variable, learning_rate)


@functools.cache
def with_kernel_decay(kind: type, *, coupled: bool) -> type:
    """Returns an optimizer's class in which only the kernels decay.

    Args:
        kind: A class of `keras.optimizers`, such as `SGD`.
        coupled: Whether the decay is added to the gradient, as
            `CoupledKernelDecay` does; else as `KernelDecay` does.

    Returns:
        A class that takes what `kind` takes; `weight_decay` may be a
        `keras.optimizers.schedules.LearningRateSchedule`. A file with such an
        optimizer loads after this function was called for its class.

    Example:
        >>> sgd = with_kernel_decay(keras.optimizers.SGD, coupled=True)
        >>> schedules = keras.optimizers.schedules
        >>> decay = schedules.PiecewiseConstantDecay([999], [1e-4, 0.0])
        >>> optimizer = sgd(0.1, momentum=0.9, weight_decay=decay)
    """
    mixin = CoupledKernelDecay if coupled else KernelDecay
    name = f"{kind.__name__}With{mixin.__name__}"
    made = type(name, (mixin, kind), {"__module__": __name__})
    return keras.saving.register_keras_serializable("tfdistill")(made)


def _is_schedule(decay: Any) -> bool:
    return isinstance(decay, _Schedule)


@keras.saving.register_keras_serializable("tfdistill")
class LARS(KernelDecay, keras.optimizers.Optimizer):
    """Layer-wise adaptive rate scaling (You et al. 2017, arXiv:1708.03888).

    A kernel w with gradient g is updated by algorithm 1 of the paper::

        rate = trust_coefficient |w| / (|g| + weight_decay |w|)
        velocity = momentum velocity + learning_rate rate (g + weight_decay w)
        w = w - velocity

    where |.| is the Euclidean norm over the whole variable, and the rate is 1
    where |w| or |g| is 0. Biases, parameters of normalization layers and
    other variables with fewer than two dimensions have rate 1 and no decay:
    plain momentum. On several replicas g is the sum over all of them. Models
    with `ShardedEmbedding` or on parameter servers refuse this optimizer: their
    updates are single operations, and the norms of a table would need all of
    its rows.

    Args:
        learning_rate: Float or schedule; of the order of 1 to 30 for kernels.
            Default 1.
        momentum: In [0, 1). Default 0.9.
        nesterov: Whether to look ahead by Nesterov's formula. Default False.
        trust_coefficient: > 0. Default 0.001, the paper's.
        **kwargs: `weight_decay` (a float, a schedule of the step, or None, the
            default: none), clipping and others of
            `keras.optimizers.Optimizer`.

    Raises:
        ValueError: If a number is out of range.

    Example:
        >>> optimizer = LARS(8.0, weight_decay=1e-4)
    """

    _is_coupled = True

    def __init__(
        self,
        learning_rate: Any = 1.0,
        *,
        momentum: float = 0.9,
        nesterov: bool = False,
        trust_coefficient: float = 0.001,
        **kwargs: Any,
    ) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(
                f"`momentum` must be in [0, 1); received {momentum}."
            )
        if not trust_coefficient > 0:
            raise ValueError(
                "`trust_coefficient` must be > 0; received "
                f"{trust_coefficient}."
            )
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.momentum = momentum
        self.nesterov = nesterov
        self.trust_coefficient = trust_coefficient

    def build(self, variables: Sequence[Any]) -> None:
        """Makes a velocity for each variable."""
        if self.built:
            return
        super().build(variables)
        self._velocities = self.add_optimizer_variables(variables, "velocity")

    def update_step(
        self, gradient: Any, variable: Any, learning_rate: Any
    ) -> None:
        """Updates one variable on one replica."""
        dtype = variable.dtype
        step = tf.cast(tf.convert_to_tensor(gradient), dtype)
        rate = tf.cast(learning_rate, dtype)
        if self.is_decayed(variable):
            weights = tf.convert_to_tensor(variable)
            decay = self.weight_decay
            decay = tf.cast(0.0 if decay is None else decay, tf.float32)
            rate *= tf.cast(self._trust(weights, step, decay), dtype)
            step += tf.cast(decay, dtype) * weights
        index = keras_internals.variable_index(self, variable)
        velocity = self._velocities[index]
        momentum = tf.cast(self.momentum, dtype)
        moved = momentum * tf.convert_to_tensor(velocity) + rate * step
        self.assign(velocity, moved)
        change = momentum * moved + rate * step if self.nesterov else moved
        self.assign_sub(variable, change)

    def _trust(
        self, weights: tf.Tensor, gradient: tf.Tensor, decay: tf.Tensor
    ) -> tf.Tensor:
        # In float32, since squares of bfloat16 lose what they sum up.
        size, slope = (
            tf.norm(tf.cast(value, tf.float32)) for value in (weights, gradient)
        )
        both = tf.logical_and(size > 0, slope > 0)
        ratio = self.trust_coefficient * size / (slope + decay * size)
        return tf.where(both, ratio, 1.0)

    def get_config(self) -> dict[str, Any]:
        """Returns what makes an equal optimizer; for `from_config`."""
        return {
            **super().get_config(),
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "trust_coefficient": self.trust_coefficient,
        }
