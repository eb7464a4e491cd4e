"""Waits of tests for what another thread or process does, with a limit."""

import time
from collections.abc import Callable
from typing import TypeVar

LIMIT_SECS = 60.0
_Value = TypeVar("_Value")


def until(
    condition: Callable[[], _Value],
    what: str = "it",
    *,
    limit_secs: float = LIMIT_SECS,
    pause_secs: float = 0.01,
) -> _Value:
    """Returns a condition's value once that is true, or fails the test."""
    end = time.monotonic() + limit_secs
    while not (value := condition()):
        assert time.monotonic() < end, f"{what} did not happen in time"
        time.sleep(pause_secs)
    return value
