"""Weight decay of kernels only; and what optimizers of your own need."""

import functools
import typing
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill.system import keras_internals

__all__ = ["variable_index", "with_kernel_decay"]

_Schedule = keras.optimizers.schedules.LearningRateSchedule
# Names of what normalization layers learn, and biases; biases of attention and
# of recurrent layers have more than one dimension.
_NOT_KERNELS = ("beta", "bias", "gamma", "scale")

_Base: Any = keras.optimizers.Optimizer if typing.TYPE_CHECKING else object


def is_kernel(variable: keras.Variable) -> bool:
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
    """Limits an optimizer's weight decay to kernels, with an optional schedule.

    A mixin before an optimizer of Keras. In Keras' way, kernels shrink before
    each update by learning rate x decay (Loshchilov & Hutter 2017,
    arXiv:1711.05101). If it is coupled, decay x kernel is added to the kernel's
    clipped gradient, as an L2 penalty would: it passes through the momentum, as
    in Goyal et al. 2017 (arXiv:1706.02677, section 3) and most recipes for SGD.
    With momentum m, kernels then shrink by about 1 / (1 - m) times as much as
    by the same number in Keras' way. `weight_decay` may be a schedule of the
    step.
    """

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
        """Makes the optimizer's variables; all but kernels do not decay."""
        if not self.built:
            exempt = [
                v for v in variables if self._is_coupled or not is_kernel(v)
            ]
            super().exclude_from_weight_decay(var_list=exempt)
            super().build(variables)

    def exclude_from_weight_decay(
        self,
        var_list: Sequence[keras.Variable] | None = None,
        var_names: Sequence[str] | None = None,
    ) -> None:
        """Refuses: which variables decay follows from what they are."""
        raise ValueError(
            f"{type(self).__name__} decays all kernels and nothing else; "
            "received variables to exclude. To choose the variables, use an "
            "optimizer of keras.optimizers."
        )

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

    def update_step(
        self,
        gradient: tf.Tensor,
        variable: keras.Variable,
        learning_rate: tf.Tensor,
    ) -> None:
        """Updates one variable on one replica."""
        decay = self.weight_decay
        if self._is_coupled and decay is not None and is_kernel(variable):
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
        coupled: Whether the decay is added to the gradient; else kernels decay
            apart from it, in Keras' way. See `KernelDecay`.

    Returns:
        A class with the arguments of `kind`, except that `weight_decay` may
        also be a `keras.optimizers.schedules.LearningRateSchedule`. A file with
        such an optimizer loads after this function was called for its class.

    Example:
        >>> sgd = with_kernel_decay(keras.optimizers.SGD, coupled=True)
        >>> schedules = keras.optimizers.schedules
        >>> decay = schedules.PiecewiseConstantDecay([999], [1e-4, 0.0])
        >>> optimizer = sgd(0.1, momentum=0.9, weight_decay=decay)
    """
    name = f"{kind.__name__}With{'Coupled' if coupled else ''}KernelDecay"
    made = type(
        name,
        (KernelDecay, kind),
        {"__module__": __name__, "_is_coupled": coupled},
    )
    return keras.saving.register_keras_serializable("tfdistill")(made)


def _is_schedule(decay: object) -> bool:
    return isinstance(decay, _Schedule)


def variable_index(optimizer: keras.optimizers.Optimizer, variable: Any) -> int:
    """Returns the place of a variable among those an optimizer was built for.

    In `update_step`, on every replica: the index of its slots in lists that
    `build` made.

    Args:
        optimizer: A built optimizer.
        variable: What `update_step` is given.

    Example:
        >>> optimizer = keras.optimizers.SGD()
        >>> variables = [keras.Variable(0.0), keras.Variable(1.0)]
        >>> optimizer.build(variables)
        >>> variable_index(optimizer, variables[1])
        1
    """
    return keras_internals.variable_index(optimizer, variable)
