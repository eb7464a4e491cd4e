"""Decides when the dead workers of a parameter-server group start again.

TensorFlow's coordinator takes dead workers back once all of them are back. So
the delays are short, and once one worker is given up no other is started again.
"""

from collections.abc import Iterable
from collections.abc import Mapping

from tfdistill import backoff

# So that a worker which cannot start does not use up its restarts at once.
_FIRST_DELAY_SECS = 1.0
_LONGEST_DELAY_SECS = 10.0
# One that has worked for so long could start: the next delay is the first.
_HEALTHY_SECS = 60.0


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
        delay = backoff.delay_secs(
            self._in_a_row[name],
            first_secs=_FIRST_DELAY_SECS,
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
