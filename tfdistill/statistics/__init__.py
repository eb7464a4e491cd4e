"""Statistics of figures, and how reports show them: tables, plots, points.

Any room may use it, contrib, too: it stands on `metrics` and NumPy, and knows
nothing of runs.
"""
