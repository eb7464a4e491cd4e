"""Versions on disk: claimed, published, signed, read, pruned."""
