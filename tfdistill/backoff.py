"""How long to leave alone what has just failed."""

import time
from collections.abc import Callable


def delay_secs(
    num_failures: int, *, first_secs: float, longest_secs: float
) -> float:
    """Returns the pause after some failures in a row.

    Args:
        num_failures: Failures before this one.
        first_secs: The pause after the first; each is twice the one before.
        longest_secs: What no pause exceeds.
    """
    # No float has room for 2 to the power of many thousands.
    return min(first_secs * 2.0 ** min(num_failures, 64), longest_secs)


class Backoff:
    """Doubles the pause with each failure in a row; a success ends it.

    Example:
    >>> now = 100.0
    >>> pause = Backoff(first_secs=1.0, longest_secs=30.0, clock=lambda: now)
    >>> pause.failed()
    >>> pause.is_over
    False
    >>> now += 1.0
    >>> pause.is_over
    True
    """

    def __init__(
        self,
        *,
        first_secs: float,
        longest_secs: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts without a pause.

        Args:
            first_secs: Seconds of the first pause, > 0.
            longest_secs: Seconds that no pause exceeds, >= `first_secs`.
            clock: Seconds of a clock that never goes backwards. Default:
                `time.monotonic`.
        """
        if not 0 < first_secs <= longest_secs:
            raise ValueError(
                "`first_secs` must be > 0 and at most `longest_secs`; received "
                f"{first_secs!r} and {longest_secs!r}."
            )
        self._first_secs = first_secs
        self._longest_secs = longest_secs
        self._clock = clock
        self._num_failures = 0
        self._until: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether it is time to try again."""
        until = self._until
        return until is None or self._clock() >= until

    def failed(self) -> None:
        """Starts a pause, twice as long as the one before."""
        self._until = self._clock() + delay_secs(
            self._num_failures,
            first_secs=self._first_secs,
            longest_secs=self._longest_secs,
        )
        self._num_failures += 1

    def succeeded(self) -> None:
        """Ends the pause; the next one is short again."""
        self._num_failures = 0
        self._until = None
