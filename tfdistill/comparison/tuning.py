"""Chooses one field's value for each method, by data that no report uses.

Imports neither TensorFlow nor Keras.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdistill.comparison import collect
from tfdistill.comparison import trials
from tfdistill.recipes import recipes

# Far from the seeds of trials, and of further members of ensembles.
_FIRST_SEED = 500


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """A field, the values that each method is tried with, and how.

    `overrides` turn the report's recipe into the recipe of these trials, which
    have other validation data.
    """

    field: str
    values: tuple[str, ...]
    overrides: tuple[str, ...]
    num_trials: int

    @classmethod
    def parse(
        cls, text: str, *, overrides: Sequence[str], num_trials: int
    ) -> "Tuning":
        """Returns what the options of `tfdistill compare` ask for."""
        field, equals, after = text.partition("=")
        values = trials.split(after)
        if not equals or not field or len(set(values)) < 2 or not all(values):
            raise ValueError(
                "--tune must be FIELD=VALUE,VALUE,... with different values, "
                "such as learning_rate=0.01,0.02; received "
                f"{text!r}."
            )
        if not overrides:
            raise ValueError(
                "--tune must use validation data other than the report's; "
                "received no --tune-override. Name other data, such as "
                "--tune-override=validation=tuning or another path."
            )
        return cls(
            field=trials.ALIASES.get(field, field),
            values=tuple(values),
            overrides=tuple(overrides),
            num_trials=num_trials,
        )

    def tuned(self, setup: trials.Setup, value: str) -> trials.Setup:
        """Returns the setup with a value of the field."""
        return _changed(setup, [f"{self.field}={value}"])

    def trials(
        self, variant: trials.Variant, setup: trials.Setup
    ) -> dict[str, list[trials.Trial]]:
        """Returns the trials of one method, by value.

        A batch belongs to a whole group: one worker trains the same.
        """
        setup = _changed(setup, self.overrides)
        if not setup.ps_per_group:
            setup = dataclasses.replace(setup, workers_per_group=1)
        return {
            value: [
                variant.trial(self.tuned(setup, value), _FIRST_SEED + index)
                for index in range(self.num_trials)
            ]
            for value in self.values
        }

    def chosen(
        self, found: dict[str, list[collect.Finished]]
    ) -> dict[str, Any]:
        """Returns the value of the lowest mean final loss, and all losses."""
        losses = {
            value: [trial.figures[collect.METRIC] for trial in trials]
            for value, trials in found.items()
        }
        best = min(losses, key=lambda value: float(np.mean(losses[value])))
        return {"field": self.field, "value": best, "losses": losses}


def _changed(setup: trials.Setup, changes: Sequence[str]) -> trials.Setup:
    recipe = recipes.override(setup.recipe, changes)
    return dataclasses.replace(setup, recipe=recipe)
