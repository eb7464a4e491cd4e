"""Values of JSON that others wrote, where they are of the expected type."""

import math
from typing import Any

# What the programs of other languages, too, take for a whole number.
_MAX_WHOLE = 2**63


def number(value: Any) -> float | None:
    """Returns a finite number as a float, or None for anything else.

    Args:
        value: What JSON held.

    Example:
        >>> number(3), number(True), number("3"), number(float("nan"))
        (3.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        result = float(value)
    except OverflowError:
        return None
    return result if math.isfinite(result) else None


def whole(value: Any) -> int | None:
    """Returns a whole number of 64 bits, or None for anything else.

    Args:
        value: What JSON held.

    Example:
        >>> whole(-3), whole(True), whole(3.0), whole(10**30)
        (-3, None, None, None)
    """
    if type(value) is int and -_MAX_WHOLE <= value < _MAX_WHOLE:
        return value
    return None
