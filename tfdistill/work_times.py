"""How long one kind of work takes: the last time, and in all."""

import contextlib
import time
from collections.abc import Callable
from collections.abc import Iterator


class WorkTimes:
    """Seconds of one kind of work, measured on the thread that does it.

    One thread measures and others may read: each figure is replaced as a
    whole.

    Attributes:
        last_secs: Seconds of the last time; None before the first.
        total_secs: Seconds of all times.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Has measured nothing yet.

        Args:
            clock: Seconds of a clock that never goes backwards.
        """
        self._clock = clock
        self.last_secs: float | None = None
        self.total_secs = 0.0

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Measures what is done within, also where it fails."""
        begin = self._clock()
        try:
            yield
        finally:
            self.last_secs = self._clock() - begin
            self.total_secs += self.last_secs
