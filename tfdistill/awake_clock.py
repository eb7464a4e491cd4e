"""A clock that does not count the time its owner could not look at it.

Who judges others by their silence must not count the seconds in which it was
itself asleep: a paused machine, or one too busy to let the launcher run, would
make every task look dead.
"""

import time
from collections.abc import Callable

_LONGEST_TICK_SECS = 1.0


class AwakeClock:
    """Seconds that go on by at most one from one reading to the next."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Starts at 0.

        Args:
            clock: Seconds that never go backwards.
        """
        self._clock = clock
        self._last = clock()
        self._total = 0.0

    def read(self) -> float:
        """Returns the seconds since the start, sleep left out."""
        now = self._clock()
        self._total += min(now - self._last, _LONGEST_TICK_SECS)
        self._last = now
        return self._total
