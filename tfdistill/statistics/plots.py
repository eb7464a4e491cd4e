"""Figures of a report, drawn without a screen."""

from typing import Any

# A line that something is compared with.
REFERENCE = {"color": "0.5", "linestyle": ":"}


def figure(width: float, height: float, *, columns: int = 1) -> tuple[Any, Any]:
    """Returns a figure, and its axes: an array of them for several columns."""
    # Imported here: it takes a second. Never `pyplot`, which may want a screen.
    from matplotlib import figure as figure_lib

    made = figure_lib.Figure(figsize=(width, height), layout="constrained")
    return made, made.subplots(1, columns)
