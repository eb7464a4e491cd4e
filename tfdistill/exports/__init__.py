"""The student as a SavedModel; SavedModels as checked, frozen functions."""

# Modules on which contrib, and what others write, may stand.
__all__ = ["promotion"]
