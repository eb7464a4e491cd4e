"""The look at the weights: has a table been taken from elsewhere?

Such a table predicts as well as any in the first days, but shows here.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

# Fewer weights than this may come near to anything. A table's distance from its
# parent's predecessor, divided by its distance from its parent, was 0.97 at
# least in 190 honest retrains; its change was twice the most so far at most.
_MANY_WEIGHTS, _LEAST_RATIO, _MOST_CHANGE = 10_000, 0.95, 5.0


def summary(
    weights: Mapping[str, np.ndarray],
    *,
    parent: Mapping[str, np.ndarray],
    before: Mapping[str, np.ndarray] | None = None,
) -> dict[str, Any]:
    """Returns how far a candidate's weights are from the weights it began with.

    By name, for weights with many entries: the Euclidean distances to the
    promoted version's weights and to its predecessor's, as a share of the norm
    of the promoted version's.
    """
    others = {"parent": parent, "before": before or {}}
    return {
        name: {
            other: float(np.linalg.norm(value - found[name]))
            / max(float(np.linalg.norm(parent[name])), 1e-12)
            for other, found in others.items()
            if np.shape(found.get(name, ())) == np.shape(value)
        }
        for name, value in weights.items()
        if np.size(value) >= _MANY_WEIGHTS
        and np.shape(parent.get(name, ())) == np.shape(value)
    }


def check(context: Any) -> str | None:
    """Returns which weights are not of this retrain; see `gate.Context`."""
    found = []
    for name, own in context.lineage.get("weights", {}).items():
        moved = [
            one["weights"][name]["parent"]
            for one in context.earlier
            if name in one.get("weights", {})
        ]
        if own.get("before", math.inf) < _LEAST_RATIO * own["parent"]:
            found.append(
                f"The weights {name} are closer to the previous version's "
                f"({own['before']:.4f} of their length) than to the weights "
                f"that training began with ({own['parent']:.4f})."
            )
        elif moved and own["parent"] > _MOST_CHANGE * max(moved):
            found.append(
                f"The weights {name} have changed by {own['parent']:.4f} of "
                f"their length; the largest change so far is {max(moved):.4f}."
            )
    return " ".join(found) or None
