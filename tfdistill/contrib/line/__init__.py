"""The model line: one model that is retrained, judged and promoted again."""

import typing

from tfdistill.system import lazy

if typing.TYPE_CHECKING:
    from tfdistill.contrib.line.gate import Context as Context
    from tfdistill.contrib.line.gate import Gate as Gate
    from tfdistill.contrib.line.settings import LineSettings as LineSettings
    from tfdistill.contrib.line.store import Line as Line

__getattr__, __dir__, __all__ = lazy.attach(
    __name__,
    {
        "gate": ["Context", "Gate"],
        "settings": ["LineSettings"],
        "store": ["Line"],
    },
)
