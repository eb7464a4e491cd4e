"""Predictions on held-out data: made, kept on disk, and what they are of."""

# Modules on which contrib, and what others write, may stand.
__all__ = ["objectives", "predictions"]
