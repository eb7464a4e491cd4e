"""Work beside the training thread: one job at a time, pauses, durations."""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from collections.abc import Iterator

_log = logging.getLogger(__name__)


class OneJobThread:
    """Does one job at a time in the background, if it is not busy."""

    def __init__(self, name: str, *, job: str = "export", most: int = 1):
        """Starts the thread; `job` says what it writes, for the log.

        It is busy with `most` jobs, of which all but one wait for their turn.
        """
        self._job = job
        self._jobs: queue.SimpleQueue[Callable[[], None] | None]
        self._jobs = queue.SimpleQueue()
        self._most, self._free = most, threading.Semaphore(most)
        self._thread = threading.Thread(
            target=self._run, name=name, daemon=True
        )
        self._thread.start()

    def submit(
        self, job: Callable[[], None], *, wait_secs: float | None
    ) -> bool:
        """Hands over a job, if the thread is not busy within `wait_secs`.

        With None it waits as long as the thread is busy.
        """
        if not self._free.acquire(timeout=wait_secs):
            return False
        self._jobs.put(job)
        return True

    def wait_idle(self, timeout_secs: float) -> bool:
        """Waits until no job is in progress; whether that is so in time."""
        deadline = time.monotonic() + timeout_secs
        num_free = 0
        while num_free < self._most and self._free.acquire(
            timeout=max(deadline - time.monotonic(), 0.0)
        ):
            num_free += 1
        if num_free:
            self._free.release(num_free)
        return num_free == self._most

    def close(self, timeout_secs: float) -> None:
        """Waits for the job in progress and ends the thread."""
        self._jobs.put(None)
        self._thread.join(timeout_secs)
        if self._thread.is_alive():
            _log.warning(
                "The last %s was not written within %.0f s and was abandoned. "
                "Check that its storage is reachable.",
                self._job,
                timeout_secs,
            )

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # Training must not end for a file.
                _log.exception("The %s failed; training continues.", self._job)
            finally:
                self._free.release()


class Backoff:
    """Doubles the pause with each failure in a row; a success ends it.

    Example:
    >>> now = 100.0
    >>> pause = Backoff(first_secs=1.0, longest_secs=30.0, clock=lambda: now)
    >>> pause.failed()
    1.0
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

    def failed(self) -> float:
        """Starts a pause, twice as long as the one before; its seconds."""
        # No float has room for 2 to the power of many thousands.
        doubled = self._first_secs * 2.0 ** min(self._num_failures, 64)
        secs = min(doubled, self._longest_secs)
        self._until = self._clock() + secs
        self._num_failures += 1
        return secs

    def succeeded(self) -> None:
        """Ends the pause; the next one is short again."""
        self._num_failures = 0
        self._until = None


class WorkTimes:
    """Seconds of one kind of work, measured on the thread that does it.

    One thread measures and others may read: each figure is replaced as a
    whole.
    """

    def __init__(self) -> None:
        self.last_secs: float | None = None
        self.total_secs = 0.0

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Measures the block, also if it fails."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.last_secs = time.perf_counter() - begin
            self.total_secs += self.last_secs
