"""What a workload sets for its model line."""

import dataclasses
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

from tfdistill.contrib.line import gate as gate_lib
from tfdistill.recipes import recipes


@dataclasses.dataclass(frozen=True, kw_only=True)
class LineSettings:
    """How a workload's retrains are taught and judged: `Workload(line=...)`.

    Attributes:
        churn_budget: The largest churn (`metrics.churn`) that a retrain may
            cause. Default 0: no budget.
        gate: What may be promoted. Default: a gate with its own defaults, whose
            churn limit is the budget if there is one.
        slices: Called with the inputs of the held-out data, as arrays; returns
            by name which examples are judged by themselves, bool `[examples]`.

    Example:
        >>> LineSettings(churn_budget=0.01).gate_settings()
        {'churn': 0.01}
    """

    churn_budget: float = 0.0
    gate: gate_lib.Gate | None = None
    slices: Callable[[Any], Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        """Checks the budget."""
        if not 0 <= self.churn_budget < 1:
            raise ValueError(
                "`churn_budget` must be >= 0 and < 1; received "
                f"{self.churn_budget}. 0.01 lets a probability move by 0.01 on "
                "average."
            )

    def gate_settings(self) -> dict[str, Any]:
        """Returns the arguments of the gate, for JSON."""
        if self.gate is not None:
            return self.gate.settings()
        return {"churn": self.churn_budget} if self.churn_budget else {}


def check_takes_spans(recipe: recipes.Recipe) -> None:
    """Checks that a recipe has an argument for the data to train on."""
    if "spans" not in recipe.arguments:
        raise ValueError(
            "The recipe of a line must have the argument `spans`, a list of "
            f"names of training data, oldest first; {recipe.recipe} has "
            f"{', '.join(recipe.arguments) or 'none'}. Add spans=(), and "
            "select the rows by it."
        )
