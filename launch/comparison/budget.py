"""How much training each method gets, so that no method secretly gets more.

Imports neither TensorFlow nor Keras.
"""

import dataclasses
import fractions
import math
from typing import Any

from launch import config as config_lib

BUDGETS = ("per_group", "total")
# Fields that count steps of the whole run; they shrink with it.
_STEP_FIELDS = {
    "codistillation": ("burn_in_steps", "ramp_steps", "boundaries"),
    "optimizer": ("warmup_steps", "boundaries"),
}


def scaled(
    config: config_lib.Config, share: fractions.Fraction
) -> config_lib.Config:
    """Returns the same run in fewer steps, with all of its schedule.

    Evaluations keep their number, and come at the same shares of the run.

    Args:
        config: The whole run.
        share: Of its steps, in (0, 1].

    Returns:
        A run of `share * num_steps` steps, or a few less: a whole number of
        executions between evaluations.

    Raises:
        ValueError: If too few steps are left for that.
    """
    if share == 1:
        return config
    num_evaluations = config.num_steps // config.evaluate_every_steps
    unit = config.steps_per_execution
    wanted = config.num_steps * share / num_evaluations / unit
    every = math.floor(wanted) * unit  # Never more than its share.
    if not every:
        raise ValueError(
            f"{share} of {config.num_steps} steps leave less than one step "
            f"for each of {num_evaluations} evaluations. Raise num_steps or "
            "evaluate_every_steps, or use --budget=per_group."
        )
    share = fractions.Fraction(every * num_evaluations, config.num_steps)
    changes: dict[str, Any] = {
        "num_steps": every * num_evaluations,
        "evaluate_every_steps": every,
    }
    for name, fields in _STEP_FIELDS.items():
        section = getattr(config, name)
        known = {field.name for field in dataclasses.fields(section)}
        changes[name] = dataclasses.replace(
            section,
            **{
                field: _shrunk(getattr(section, field), share)
                for field in fields
                if field in known
            },
        )
    return dataclasses.replace(config, **changes)


def _shrunk(steps: Any, share: fractions.Fraction) -> Any:
    if steps is None:
        return None
    if isinstance(steps, tuple):
        return tuple(max(1, round(step * share)) for step in steps)
    return round(steps * share)
