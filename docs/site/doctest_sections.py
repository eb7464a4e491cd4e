"""Shows the examples of docstrings as code, under the heading in use here."""

import re
from typing import Any

import griffe

_HEADING = re.compile(r"^( *)Example:$", re.MULTILINE)


class DoctestSections(griffe.Extension):
    """Reads `Example:` as the section that Google's style calls `Examples:`."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Renames the heading before the docstring is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = _HEADING.sub(
                r"\1Examples:", obj.docstring.value
            )
