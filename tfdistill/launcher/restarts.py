"""Whether and when a group, or a worker, that has failed is started again."""

import time
from collections.abc import Callable

from tfdistill.system import background

# For a group that failed before it was healthy, and may well fail again.
_FIRST_DELAY_SECS = 0.5
# So that a worker which cannot start does not use up its restarts at once.
WORKER_FIRST_DELAY_SECS = 1.0
_LONGEST_DELAY_SECS = 10.0
# A group that ran for so long could start, so its first restart doesn't wait:
# most failures are one lost process.
HEALTHY_SECS = 10.0
# Another port is soon found; more conflicts than this aren't an accident.
_PORT_TRIES = 3
# Wrong options and wrong data, and a command that cannot be run.
_HOPELESS = {
    2: "wrong options",
    65: "wrong data",
    126: "a command that cannot be run",
    127: "a command that does not exist",
}


class Restarts:
    """The restarts that one group or worker has, and when the next is due.

    Attributes:
        limit: How many there may be.
        made: Restarts so far, the planned one included.
        num_starts: Starts so far, restarts that did not count included.
    """

    def __init__(
        self,
        *,
        limit: int,
        first_delay_secs: float = _FIRST_DELAY_SECS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit = limit
        self.made = 0
        self.num_starts = 1
        self._planned = False
        self._port_tries = 1
        self._clock = clock
        self._started = clock()
        self._pause = background.Backoff(
            first_secs=first_delay_secs,
            longest_secs=_LONGEST_DELAY_SECS,
            clock=clock,
        )

    def plan(self) -> float | None:
        """Plans the next restart; its delay, or None if none is left."""
        if self.made >= self.limit:
            return None
        self.made += 1
        self._planned = True
        if self._clock() - self._started >= HEALTHY_SECS:
            self._pause.succeeded()
            return 0.0
        return self._pause.failed()

    def plan_after(
        self, exit_code: int, *, port_taken: bool
    ) -> tuple[float | None, str]:
        """Plans the next restart of a group by the reason of its failure.

        The first starts that fail on an occupied port (`port_taken`) use up no
        restart.
        Returns the seconds until the next start, or None if there is none; and
        a text for the user, which may be empty.
        """
        if port_taken and self._port_tries < _PORT_TRIES:
            self._port_tries += 1
            self._planned = True
            return 0.0, "one of its ports was taken; it starts on other ports"
        if not self.limit:
            return None, ""
        if why := _HOPELESS.get(exit_code):
            return None, (
                f"not restarted: exit code {exit_code} means {why}, and a "
                "retry would fail the same way"
            )
        delay = self.plan()
        if delay is None:
            return None, (
                f"its {self.limit} restarts (--max-restarts) are used up"
            )
        return delay, f"restart {self.made} of {self.limit} in {delay:g} s"

    @property
    def is_due(self) -> bool:
        """Whether it is time for the planned one."""
        return self._planned and self._pause.is_over

    def note_start(self) -> None:
        """Takes in that the planned one was made."""
        self._planned = False
        self.num_starts += 1
        self._started = self._clock()
