"""Whether and when a group, or a worker, that has failed is started again.

TensorFlow's coordinator takes dead workers back once all of them are back. So
the delays are short, and once one worker is given up no other is started again.
"""

from collections.abc import Iterable
from collections.abc import Mapping

from tfdistill.system import background

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
        delay = background.delay_secs(
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


# So that a worker which cannot start does not use up its restarts at once.
_WORKER_FIRST_DELAY_SECS = 1.0


class WorkerRestarts:
    """The restarts of one group's workers: those made, planned and left.

    Times are seconds of any one clock, passed in.
    """

    def __init__(self, names: Iterable[str], *, limit: int) -> None:
        """Plans nothing yet.

        Args:
            names: The workers.
            limit: Restarts that each of them has.
        """
        self.limit = limit
        self._made = dict.fromkeys(names, 0)
        self._in_a_row = dict(self._made)
        self._started: dict[str, float] = {}
        self._due: dict[str, float] = {}
        self._given_up: set[str] = set()

    @property
    def made(self) -> Mapping[str, int]:
        """Restarts so far, by name of the worker."""
        return dict(self._made)

    @property
    def none_left(self) -> bool:
        """Whether no worker runs nor will run again."""
        return self._given_up == set(self._made)

    def is_known_dead(self, name: str) -> bool:
        """Whether the end of the worker has been noted before."""
        return name in self._due or name in self._given_up

    def note_end(self, name: str, *, now: float) -> float | None:
        """Takes in that a worker has ended, and plans its restart.

        Args:
            name: The worker.
            now: The present time.

        Returns:
            Seconds until the restart: 1, doubled for each restart after which
            this worker ran for less than a minute, up to 10. None if it is
            given up: it has no restart left, or another has none.
        """
        if self._given_up or self._made[name] >= self.limit:
            self._given_up |= {name, *self._due}
            self._due.clear()
            return None
        if now - self._started.get(name, now) >= _HEALTHY_SECS:
            self._in_a_row[name] = 0
        delay = background.delay_secs(
            self._in_a_row[name],
            first_secs=_WORKER_FIRST_DELAY_SECS,
            longest_secs=_LONGEST_DELAY_SECS,
        )
        self._due[name] = now + delay
        return delay

    def due(self, *, now: float) -> list[str]:
        """Returns the workers to be started again now."""
        return [name for name, when in self._due.items() if when <= now]

    def note_restart(self, name: str, *, now: float) -> None:
        """Takes in that a worker was started again."""
        del self._due[name]
        self._made[name] += 1
        self._in_a_row[name] += 1
        self._started[name] = now
