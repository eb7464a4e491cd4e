"""How fast training gets on between two looks, without evaluations."""

import time
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any


class TrainingPace:
    """Counts steps, examples and seconds since the last look."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Starts the clock.

        Args:
            clock: Seconds of a clock that never goes backwards.
        """
        self._clock = clock
        # Callbacks whose `blocked` tells how long they held training up.
        self._blocking: list[Any] = []
        self._paused_at: float | None = None
        self.begin()

    def begin(self, blocking: Sequence[Any] | None = None) -> None:
        """Starts to measure anew.

        Args:
            blocking: Callbacks with `blocked`, a `work_times.WorkTimes`.
                Default: those of before.
        """
        if blocking is not None:
            self._blocking = list(blocking)
        self._start = self._clock()
        if self._paused_at is not None:
            self._paused_at = self._start
        self._paused_secs = 0.0
        self._blocked_before = self._blocked_secs()
        self.num_steps, self._num_examples = 0, 0.0

    def add(self, num_steps: int, num_examples: float) -> None:
        """Counts what one execution did."""
        self.num_steps += num_steps
        self._num_examples += num_examples

    def pause(self) -> None:
        """Stops the clock: an evaluation begins, or an epoch has ended."""
        self._paused_at = self._clock()

    def go_on(self) -> None:
        """Starts the clock again."""
        if self._paused_at is not None:
            self._paused_secs += self._clock() - self._paused_at
            self._paused_at = None

    def take(self) -> dict[str, float]:
        """Returns what was measured, by tag, and begins anew."""
        now = self._clock() if self._paused_at is None else self._paused_at
        secs = now - self._start - self._paused_secs
        blocked = self._blocked_secs() - self._blocked_before
        steps, examples = self.num_steps, self._num_examples
        self.begin()
        if not steps or secs <= 0.0:
            return {}
        return {
            "host/examples_per_second": examples / secs,
            "host/step_secs": secs / steps,
            "exchange/blocked_share": min(1.0, blocked / secs),
        }

    def _blocked_secs(self) -> float:
        return sum(c.blocked.total_secs for c in self._blocking)
