"""Weights that groups mix: the rules by which they do.

What a user imports is here; the files of this room are behind it.
"""

from tfdistill.mixing.rules import ElasticAveraging
from tfdistill.mixing.rules import ModelAveraging
from tfdistill.mixing.rules import OuterOptimizer
from tfdistill.mixing.rules import Rule

__all__ = [
    "ElasticAveraging",
    "ModelAveraging",
    "OuterOptimizer",
    "Rule",
]
