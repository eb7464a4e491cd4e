"""Layers for large tables of ids, alike under every strategy."""

from tfdistill.embedding.dynamic import DynamicEmbedding
from tfdistill.embedding.features import FeatureEmbedding
from tfdistill.embedding.layer import ShardedEmbedding

__all__ = ["DynamicEmbedding", "FeatureEmbedding", "ShardedEmbedding"]
