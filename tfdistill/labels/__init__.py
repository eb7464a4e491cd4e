"""Predictions that come by value: in the data, from servers, from peers.

What a user imports is here; the files of this room are behind it.
"""

import importlib
import typing

from tfdistill.labels.attached import attach
from tfdistill.labels.attached import label
from tfdistill.labels.files import read
from tfdistill.labels.files import write
from tfdistill.labels.forms import Form

if typing.TYPE_CHECKING:
    from tfdistill.labels.service import Teachers as Teachers

__all__ = [
    "Form",
    "Teachers",
    "attach",
    "label",
    "read",
    "write",
]


def __getattr__(name: str) -> typing.Any:
    # On first use: only those who ask servers pay for importing gRPC.
    if name == "Teachers":
        service = importlib.import_module("tfdistill.labels.service")
        return service.Teachers
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
