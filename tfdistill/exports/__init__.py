"""The student as a SavedModel; SavedModels as checked, frozen functions."""
