"""Groups that mix their weights: the callback, and the rules by which they do.

What a user imports is here; the files of this room are behind it.
"""

import typing

from tfdistill.system import lazy

if typing.TYPE_CHECKING:
    from tfdistill.mixing.fragments import AboveRms as AboveRms
    from tfdistill.mixing.fragments import FragmentMixer as FragmentMixer
    from tfdistill.mixing.mixer import WeightMixer as WeightMixer
    from tfdistill.mixing.rules import ModelAveraging as ModelAveraging
    from tfdistill.mixing.rules import OuterOptimizer as OuterOptimizer
    from tfdistill.mixing.rules import Rule as Rule

__getattr__, __dir__, __all__ = lazy.attach(
    __name__,
    {
        "fragments": ["AboveRms", "FragmentMixer"],
        "mixer": ["WeightMixer"],
        "rules": ["ModelAveraging", "OuterOptimizer", "Rule"],
    },
)
