"""Decides whether, and when, a group that has failed is started again."""

from tfdistill import backoff

# The first one nearly at once: most failures are one lost process.
_FIRST_DELAY_SECS = 0.5
_LONGEST_DELAY_SECS = 10.0
# A group that has run for so long could start: the next delay is the first.
_HEALTHY_SECS = 60.0
# Another port is soon found; more conflicts than these are no accident.
_PORT_TRIES = 3
# Wrong options and wrong data, and a command that cannot be run.
_HOPELESS = {
    2: "wrong options",
    65: "wrong data",
    126: "a command that cannot be run",
    127: "a command that does not exist",
}


class GroupRestarts:
    """The restarts of one group: those made, and those left.

    Times are seconds of any one clock, passed in.
    """

    def __init__(self, *, limit: int, now: float) -> None:
        """Plans nothing yet.

        Args:
            limit: Restarts that the group has.
            now: Time of its first start.
        """
        self.limit = limit
        self.made = 0
        self.num_starts = 1
        self._in_a_row = 0
        self._port_tries = 1
        self._started = now
        self._due: float | None = None

    def plan(
        self, exit_code: int, *, port_taken: bool, now: float
    ) -> tuple[float | None, str]:
        """Takes in that the group has failed.

        Args:
            exit_code: That of the task to blame.
            port_taken: Whether it failed since somebody else listened on a
                port of it, which does not count as a restart.
            now: The present time.

        Returns:
            Seconds until it is started again, or None if it is not; and what
            to tell the user, which may be empty.
        """
        if port_taken and self._port_tries < _PORT_TRIES:
            self._port_tries += 1
            self._due = now
            return 0.0, "a port of it was taken: it is started on others"
        if not self.limit:
            return None, ""
        if exit_code in _HOPELESS:
            why = _HOPELESS[exit_code]
            return None, (
                f"not started again: exit code {exit_code} means {why}, and "
                "a retry would end the same way"
            )
        if self.made >= self.limit:
            return None, f"its {self.limit} restarts (--max_restarts) are over"
        if now - self._started >= _HEALTHY_SECS:
            self._in_a_row = 0
        delay = backoff.delay_secs(
            self._in_a_row,
            first_secs=_FIRST_DELAY_SECS,
            longest_secs=_LONGEST_DELAY_SECS,
        )
        self.made += 1
        self._in_a_row += 1
        self._due = now + delay
        return delay, f"restart {self.made} of {self.limit} in {delay:g} s"

    def is_due(self, *, now: float) -> bool:
        """Whether the group is to be started again now."""
        return self._due is not None and now >= self._due

    def note_start(self, *, now: float) -> None:
        """Takes in that the group was started again."""
        self._due = None
        self._started = now
        self.num_starts += 1
