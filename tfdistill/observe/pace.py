"""How fast a training is, without evaluations and pauses between epochs."""

import time
from collections.abc import Sequence
from typing import Any


class TrainingPace:
    """Counts steps, examples and seconds since the last look."""

    def __init__(self, blocking: Sequence[Any] = ()) -> None:
        """Takes the callbacks whose `blocked` counts for how long they do."""
        self._blocking = blocking
        self._begin()

    def _begin(self) -> None:
        self._blocked = sum(c.blocked.total_secs for c in self._blocking)
        self._secs = self._num_examples = 0.0
        self.num_steps = 0
        self.go_on()

    def go_on(self) -> None:
        """What took place since the last step was no training."""
        self._mark = time.perf_counter()

    def add(self, num_steps: int, num_examples: float) -> None:
        """Counts what one execution did."""
        self._secs += time.perf_counter() - self._mark
        self.go_on()
        self.num_steps += num_steps
        self._num_examples += num_examples

    def take_figures(self) -> dict[str, float]:
        """Returns what was measured, by tag, and starts again."""
        secs, steps, before = self._secs, self.num_steps, self._blocked
        examples = self._num_examples
        self._begin()
        if not steps or secs <= 0.0:
            return {}
        return {
            "host/examples_per_second": examples / secs,
            "host/step_secs": secs / steps,
            "exchange/blocked_share": min(1.0, (self._blocked - before) / secs),
        }
