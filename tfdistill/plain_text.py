"""Text from logs and files of other processes, made fit for a terminal."""

import re
from typing import Any

# Colours and cursor movements; control characters other than tabs; what turns
# the direction of text; and halves of surrogate pairs, which JSON may hold and
# no stream can write.
_CONTROL = re.compile(
    r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f-\x9f"
    r"\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def without_control(text: str) -> str:
    """Returns a line without what would steer a terminal, or break a stream.

    Args:
        text: One line.

    Example:
        >>> without_control("a" + chr(27) + "[31mb" + chr(7))
        'ab'
    """
    return _CONTROL.sub("", text)


def one_line(value: Any, *, max_chars: int = 500) -> str:
    r"""Returns any value as one line of bounded length.

    Args:
        value: What was read; text as it is, anything else as Python shows it.
        max_chars: Longest line. Default 500.

    Example:
        >>> one_line("it failed:\n  no such file", max_chars=18)
        'it failed: no s...'
    """
    text = value if isinstance(value, str) else repr(value)
    text = without_control(" ".join(text[: 4 * max_chars].split()))
    return text if len(text) <= max_chars else f"{text[: max_chars - 3]}..."
