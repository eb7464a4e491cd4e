"""When the next backup is due: Young's interval, from measured times."""

import collections
import contextlib
import math
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

# Until a backup's cost is known.
_FIRST_STEPS = 10
# Between two failures, as long as there was none.
_ASSUMED_SECS = 3600.0
# The share of the time to write a backup beside training that is a cost, too:
# writing takes memory, processors and storage.
_SHARE_OF_WRITING = 0.1
# The cheapest of so many backups counts: others were held up by something else.
_NUM_COSTS = 8


class YoungsInterval:
    """Determines when backups are due, as `steps.EverySteps` does.

    A backup that costs training `cost` seconds is best taken every
    sqrt(2 * cost * mtbf) seconds, where `mtbf` is the mean time between
    failures (J. W. Young, "A first order approximation to the optimum
    checkpoint interval", CACM 17(9), 1974). So that none is left out, it is at
    least twice the time that one takes to be written.

    Both are measured on the chief, which turns them into steps. The others
    learn its choice when a backup is due, for the one that follows.
    """

    def __init__(
        self,
        gather: Callable[[int], list[int]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes what gathers a number of each worker, the chief's first."""
        self._gather, self._clock = gather, clock
        self._costs = collections.deque[float](maxlen=_NUM_COSTS)
        self._write_secs, self._is_writing = 0.0, False
        self._began, self._secs, self._num_failures = clock(), 0.0, 0
        self.start(0)

    def state(self) -> dict[str, Any]:
        """Returns what a backup keeps: the failures so far, in what time."""
        secs = self._secs + self._clock() - self._began
        return {"num_failures": self._num_failures, "secs": secs}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` returned before one more failure."""
        self._num_failures = state["num_failures"] + 1
        self._secs = state["secs"]

    def start(self, step: int) -> None:
        """Starts to count at a step, which is not itself due."""
        self._met = (step, self._clock())
        self._steps = _FIRST_STEPS

    def due(self, step: int) -> bool:
        """Whether to back up now; all workers call it after each step."""
        last, then = self._met
        if step < last + self._steps:
            return False
        self._met = (step, self._clock())
        each = (self._met[1] - then) / (step - last)
        agreed = self._gather(self._proposed(each))[0]
        self._steps = abs(agreed)
        return agreed > 0

    def _proposed(self, step_secs: float) -> int:
        """Returns the steps to the next backup; negative to take none now."""
        if self._is_writing:
            return -2 * self._steps
        if len(self._costs) < 2:  # The first one also traces.
            return _FIRST_STEPS
        secs = self._secs + self._clock() - self._began
        mtbf = secs / self._num_failures if self._num_failures else None
        cost = min(self._costs) + _SHARE_OF_WRITING * self._write_secs
        young = math.sqrt(2 * cost * (mtbf or max(secs, _ASSUMED_SECS)))
        best = max(young, 2 * self._write_secs)
        return max(1, round(best / max(step_secs, 1e-6)))

    @contextlib.contextmanager
    def holding_up(self) -> Iterator[None]:
        """Measures what training waits for."""
        begin = self._clock()
        yield
        self._costs.append(self._clock() - begin)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Measures what is done beside it, in a thread."""
        begin, self._is_writing = self._clock(), True
        try:
            yield
        finally:
            self._write_secs = self._clock() - begin
            self._is_writing = False
