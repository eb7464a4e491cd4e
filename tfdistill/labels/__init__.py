"""Predictions that come by value: from peers, from servers, from files.

Names resolve on first use, as those of the package do.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from tfdistill.labels.service import Teachers as Teachers

_HOMES = {"Teachers": "service"}

__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> typing.Any:
    if name in _HOMES:
        home = importlib.import_module(f"tfdistill.labels.{_HOMES[name]}")
        return getattr(home, name)
    raise AttributeError(f"module 'tfdistill.labels' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
