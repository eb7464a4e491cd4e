"""Which steps are to be traced, as an option and a variable give them."""

import os
import re
from collections.abc import Mapping

# Environment of a task, for scripts that do not say it themselves.
VARIABLE = "TFDISTILL_PROFILE_STEPS"
_FORM = re.compile(r"([0-9]{1,18}):([0-9]{1,18})")


def parse(text: str) -> tuple[int, int]:
    """Returns the first and the last step to trace.

    Example:
        >>> parse("100:110")
        (100, 110)
    """
    found = _FORM.fullmatch(text.strip())
    first, last = map(int, found.groups()) if found else (0, 0)
    if not 1 <= first <= last:
        raise ValueError(
            "The steps to trace must be FIRST:LAST with 1 <= FIRST <= LAST, "
            f"such as 100:110; received {text!r}."
        )
    return first, last


def asked(
    given: str | None, environ: Mapping[str, str] | None = None
) -> tuple[int, int] | None:
    """Returns the first and last step to trace; None for no trace."""
    environ = os.environ if environ is None else environ
    text = given or environ.get(VARIABLE)
    return parse(text) if text else None
