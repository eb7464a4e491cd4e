"""Tables of ids in shards: lookups, first values, updates by rows."""

# Modules on which contrib, and what others write, may stand.
__all__ = ["rows", "sources"]
