"""Versions on disk: claimed, published, signed, read, pruned."""

# Modules on which contrib, and what others write, may stand.
__all__ = ["filesystem", "notes"]
