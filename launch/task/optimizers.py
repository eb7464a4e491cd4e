"""The optimizer that a configuration describes, with its schedules."""

from typing import Any

import keras
import tensorflow as tf

import tfdistill
from launch.config import sections
from tfdistill import contrib
from tfdistill import optimizers

# SGD whose momentum follows what mixes leave of the steps.
_QUASI_GLOBAL = "quasi_global_momentum"
# Those whose papers add the decay to the gradient.
_COUPLED = ("sgd", "lars", _QUASI_GLOBAL)


def make(
    options: sections.Optimizer, *, num_steps: int
) -> keras.optimizers.Optimizer:
    """Returns a new optimizer."""
    is_wrapped = options.name == _QUASI_GLOBAL
    settings = {
        **({} if is_wrapped else options.arguments),
        "learning_rate": _learning_rate(options, num_steps),
        "clipnorm": options.clipnorm,
        "global_clipnorm": options.global_clipnorm,
        "clipvalue": options.clipvalue,
    }
    kind = kind_of("sgd" if is_wrapped else options.name)
    if options.decay is not None:
        settings["weight_decay"] = _weight_decay(options)
        if not issubclass(kind, optimizers.KernelDecay):
            kind = optimizers.with_kernel_decay(
                kind, coupled=options.name in _COUPLED
            )
    try:
        made = kind(**settings)
        if is_wrapped:
            made = contrib.QuasiGlobalMomentum(made, **options.arguments)
        return made
    except (TypeError, ValueError) as cause:
        raise ValueError(
            f"`optimizer.arguments` do not fit {options.name}: {cause}"
        ) from cause


def kind_of(name: str) -> Any:
    """Returns the class of a name in `sections.OPTIMIZERS`."""
    # By class: `keras.optimizers.get` does not know "lamb".
    kinds: dict[str, Any] = {"lars": tfdistill.LARS}
    for attribute, found in vars(keras.optimizers).items():
        if isinstance(found, type):
            kinds[attribute.lower()] = found
    return kinds[name]


def _learning_rate(options: sections.Optimizer, num_steps: int) -> Any:
    schedules = keras.optimizers.schedules
    rate, warmup_steps = options.learning_rate, options.warmup_steps
    left = num_steps - warmup_steps
    after: Any = None
    if options.schedule == "cosine" and warmup_steps:
        return schedules.CosineDecay(
            options.warmup_from,
            left,
            warmup_target=rate,
            warmup_steps=warmup_steps,
        )
    if options.schedule == "cosine":
        after = schedules.CosineDecay(rate, left)
    elif options.schedule == "linear":
        after = schedules.PolynomialDecay(rate, left, 0.0)
    elif options.schedule == "steps":
        drops = range(1, len(options.boundaries) + 1)
        after = _piecewise(
            rate,
            [mark - warmup_steps for mark in options.boundaries],
            [options.drop_factor**number for number in drops],
        )
    if not warmup_steps:
        return rate if after is None else after
    return WarmUp(
        rate,
        warmup_steps=warmup_steps,
        warmup_from=options.warmup_from,
        after=after,
    )


def _weight_decay(
    options: sections.Optimizer,
) -> Any:
    factors = options.weight_decay_factors
    if options.decay is None or not factors:
        return options.decay
    return _piecewise(options.decay, options.boundaries, factors)


def _piecewise(start: float, boundaries: Any, factors: Any) -> Any:
    """Multiplies `start` by a factor from each boundary on."""
    return keras.optimizers.schedules.PiecewiseConstantDecay(
        # At the step of a boundary Keras still uses the previous value.
        [mark - 1 for mark in boundaries],
        [start, *(start * factor for factor in factors)],
    )


@keras.saving.register_keras_serializable("tfdistill")
class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate that rises evenly, then follows another schedule.

    The gradual warm-up of Goyal et al. 2017 (arXiv:1706.02677, section 2.2).
    """

    def __init__(
        self,
        rate: float,
        *,
        warmup_steps: int,
        warmup_from: float = 0.0,
        after: Any = None,
    ) -> None:
        """Sets the schedule.

        The steps of `after` count from the end of the warm-up.
        """
        super().__init__()
        self._rate = rate
        self._warmup_steps = warmup_steps
        self._warmup_from = warmup_from
        self._after = after

    def __call__(self, step: Any) -> tf.Tensor:
        """Returns the rate at a step, a float32 scalar."""
        step = tf.convert_to_tensor(step)
        since = step - tf.cast(self._warmup_steps, step.dtype)
        share = tf.cast(step, tf.float32) / self._warmup_steps
        rising = self._warmup_from + share * (self._rate - self._warmup_from)
        after = tf.cast(
            self._after(tf.maximum(since, 0)) if self._after else self._rate,
            tf.float32,
        )
        return tf.where(since < 0, rising, after)

    def get_config(self) -> dict[str, Any]:
        """Returns what makes an equal schedule; for `from_config`."""
        after = self._after
        return {
            "rate": self._rate,
            "warmup_steps": self._warmup_steps,
            "warmup_from": self._warmup_from,
            "after": after and keras.optimizers.schedules.serialize(after),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "WarmUp":
        """Returns the schedule that `get_config` has described."""
        after = config["after"]
        return cls(
            **{
                **config,
                "after": after
                and keras.optimizers.schedules.deserialize(after),
            }
        )
