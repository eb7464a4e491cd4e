"""Predictions that come by value: in the data, from servers, from peers.

What a user imports is here; the files of this room are behind it.
"""

import typing

from tfdistill.system import lazy

if typing.TYPE_CHECKING:
    from tfdistill.labels.attached import attach as attach
    from tfdistill.labels.attached import label as label
    from tfdistill.labels.files import read as read
    from tfdistill.labels.files import write as write
    from tfdistill.labels.forms import Form as Form
    from tfdistill.labels.service import TeacherClient as TeacherClient

__getattr__, __dir__, __all__ = lazy.attach(
    __name__,
    {
        "attached": ["attach", "label"],
        "files": ["read", "write"],
        "forms": ["Form"],
        # Only labels from servers pay for importing gRPC.
        "service": ["TeacherClient"],
    },
)
