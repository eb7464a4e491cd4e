"""Statistics of figures, and how reports show them: tables, plots, points.

Any room may use it, contrib, too: it stands on `metrics` and NumPy, and knows
nothing of runs.
"""

# Modules on which contrib, and what others write, may stand.
__all__ = ["estimates", "events", "plots", "tables"]
