"""Which task of which group this is; how a group meets, and ends."""

# Modules on which contrib, and what others write, may stand.
__all__ = ["replicas", "strategy"]
