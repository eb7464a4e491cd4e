"""Shows the examples of docstrings as code, and links the pages they name."""

import re
from typing import Any

import griffe

_HEADING = re.compile(r"^( *)Example:$", re.MULTILINE)
_PAGE = re.compile(r"`?docs/(\w+)\.md`?")


class DoctestSections(griffe.Extension):
    """Reads `Example:` as the section that Google's style calls `Examples:`."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Renames the heading before the docstring is parsed."""
        if obj.docstring is not None:
            text = _HEADING.sub(r"\1Examples:", obj.docstring.value)
            obj.docstring.value = _PAGE.sub(r"[the page \1](../\1.md)", text)
