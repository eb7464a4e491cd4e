"""Layers for large tables of ids, alike under every strategy."""

from tfdistill.embedding.features import FeatureEmbedding
from tfdistill.embedding.layer import ShardedEmbedding

__all__ = ["FeatureEmbedding", "ShardedEmbedding"]
