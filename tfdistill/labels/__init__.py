"""Predictions that come by value: in the data, from servers, from peers.

What a user imports is here; the files of this room are behind it.
"""

from tfdistill.labels.attached import Labelled
from tfdistill.labels.attached import attach
from tfdistill.labels.attached import label
from tfdistill.labels.files import WrittenLabels
from tfdistill.labels.files import read
from tfdistill.labels.files import write
from tfdistill.labels.forms import Form

__all__ = [
    "Form",
    "Labelled",
    "WrittenLabels",
    "attach",
    "label",
    "read",
    "write",
]
