"""Predictions on held-out data: made, kept on disk, and what they are of."""
