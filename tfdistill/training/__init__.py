"""A step and a fit that do not depend on how the work is shared."""

# Modules on which contrib, and what others write, may stand.
__all__ = ["steps"]
