"""Which steps are to be traced, as an option and a variable give them."""

import os
import re
from collections.abc import Mapping

# Environment of a task, for scripts that do not say it themselves.
VARIABLE = "TFDISTILL_PROFILE_STEPS"
_FORM = re.compile(r"([0-9]{1,18}):([0-9]{1,18})")


def parse(text: str) -> tuple[int, int]:
    """Returns the first and the last step to trace.

    Args:
        text: As `100:110`.

    Raises:
        ValueError: It is not of that form.

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
    """Returns the steps to trace by an option, else by the environment.

    Args:
        given: The option, as `100:110`; None if it was not given.
        environ: Variables to read. Default `os.environ`.

    Returns:
        The first and the last step; None for no trace.

    Raises:
        ValueError: They are not of that form.
    """
    environ = os.environ if environ is None else environ
    text = given or environ.get(VARIABLE)
    return parse(text) if text else None
