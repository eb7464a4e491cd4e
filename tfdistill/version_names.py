"""How the directory of a version is named."""

import re

from tfdistill import manifest

_STEP = re.compile(r"0|[1-9][0-9]{0,18}")


def step_of(name: str) -> int | None:
    """Returns the step that a directory name stands for, or None.

    Args:
        name: Of a directory in that of a group.

    Example:
        >>> step_of("1200"), step_of("012"), step_of(".tmp-12-a")
        (1200, None, None)
    """
    step = int(name) if _STEP.fullmatch(name) else None
    return step if step is not None and step <= manifest.MAX_INT else None
