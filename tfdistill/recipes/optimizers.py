"""An optimizer made of another one: what a method changes of it."""

from typing import Any

import keras

import tfdistill

# Weight decay of DiLoCo's inner optimizer; Keras' default.
_ADAMW_DECAY = 0.004


@keras.saving.register_keras_serializable("tfdistill")
class ScaledRate(keras.optimizers.schedules.LearningRateSchedule):
    """A multiple of another schedule."""

    def __init__(self, schedule: Any, factor: float) -> None:
        """Takes the other schedule, and the factor."""
        super().__init__()
        if isinstance(schedule, dict):
            schedule = keras.optimizers.schedules.deserialize(schedule)
        self._schedule = schedule
        self._factor = factor

    def __call__(self, step: Any) -> Any:
        """Returns the rate at a step."""
        return self._factor * self._schedule(step)

    def get_config(self) -> dict[str, Any]:
        """Returns what makes an equal schedule; for `from_config`."""
        schedule = keras.optimizers.schedules.serialize(self._schedule)
        return {"schedule": schedule, "factor": self._factor}


def rescaled(optimizer: keras.Optimizer, factor: float) -> Any:
    """Returns an equal optimizer with a multiple of the learning rate."""
    if factor == 1.0:
        return optimizer
    config = optimizer.get_config()
    rate = config["learning_rate"]
    if isinstance(rate, dict):
        config["learning_rate"] = keras.optimizers.schedules.serialize(
            ScaledRate(rate, factor)
        )
    else:
        config["learning_rate"] = factor * rate
    return type(optimizer).from_config(config)


def decayed(
    optimizer: keras.Optimizer,
    decay: float,
    *,
    kind: Any = None,
) -> Any:
    """Returns an equal optimizer, perhaps of another kind, whose kernels decay.

    SGD adds the decay to the gradient, as papers do.
    """
    library = tfdistill.optimizers
    kind = kind or type(optimizer)
    if not issubclass(kind, library.KernelDecay):
        coupled = issubclass(kind, keras.optimizers.SGD)
        kind = library.with_kernel_decay(kind, coupled=coupled)
    return kind.from_config(
        {**optimizer.get_config(), "weight_decay": decay, "name": None}
    )


# Settings that an optimizer of another name takes from the recipe's.
_KEPT = ("learning_rate", "clipnorm", "clipvalue", "global_clipnorm")


def named(optimizer: keras.Optimizer, name: str) -> Any:
    """Returns Keras' optimizer of a name, with another's rate and clipping.

    Example:
        >>> type(named(keras.optimizers.SGD(0.1), "schedule_free_adamw"))
        <class 'keras.src.optimizers.schedule_free_adamw.ScheduleFreeAdamW'>
    """
    found = keras.optimizers.get(name.replace("_", ""))
    given = optimizer.get_config()
    kept = {key: given[key] for key in _KEPT}
    return type(found).from_config({**found.get_config(), **kept})


def as_adamw(optimizer: keras.Optimizer) -> Any:
    """Returns AdamW in the place of Adam, and any other optimizer as it is."""
    if type(optimizer) is not keras.optimizers.Adam:
        return optimizer
    return decayed(optimizer, _ADAMW_DECAY, kind=keras.optimizers.AdamW)
