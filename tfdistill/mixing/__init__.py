"""Groups that mix their weights: the callback, and the rules by which they do.

What a user imports is here; the files of this room are behind it.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from tfdistill.mixing.mixer import WeightMixer as WeightMixer
    from tfdistill.mixing.rules import ElasticAveraging as ElasticAveraging
    from tfdistill.mixing.rules import ModelAveraging as ModelAveraging
    from tfdistill.mixing.rules import OuterOptimizer as OuterOptimizer
    from tfdistill.mixing.rules import Rule as Rule

_HOMES = {
    "ElasticAveraging": "rules",
    "ModelAveraging": "rules",
    "OuterOptimizer": "rules",
    "Rule": "rules",
    "WeightMixer": "mixer",
}
__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> typing.Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(f"{__name__}.{_HOMES[name]}")
    return getattr(home, name)
