"""Recipes: what a run trains, and what one task of it does and writes."""

# Modules on which contrib, and what others write, may stand.
__all__ = ["outputs", "recipes"]
