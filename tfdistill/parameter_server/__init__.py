"""The same fit for a model whose variables live on servers."""

# Modules on which contrib, and what others write, may stand.
__all__ = ["fetching", "variables"]
