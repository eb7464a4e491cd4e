"""A thread that does one job at a time and lets nobody queue for it."""

import logging
import queue
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)


class OneJobThread:
    """Does a job in the background, if it is not busy with another."""

    def __init__(self, name: str, *, job: str = "export") -> None:
        """Starts the thread.

        Args:
            name: Name of the thread.
            job: What it writes, for the log.
        """
        self._job = job
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(1)
        self._idle = threading.Semaphore(1)
        self._thread = threading.Thread(
            target=self._run, name=name, daemon=True
        )
        self._thread.start()

    def submit(self, job: Callable[[], None], *, wait_secs: float) -> bool:
        """Hands over a job, if the thread is idle within `wait_secs`."""
        if not self._idle.acquire(timeout=wait_secs or 0.0):
            return False
        self._jobs.put(job)
        return True

    def wait_idle(self, timeout_secs: float) -> bool:
        """Waits until no job is in progress; whether that is so in time."""
        if not self._idle.acquire(timeout=timeout_secs):
            return False
        self._idle.release()
        return True

    def close(self, timeout_secs: float) -> None:
        """Waits for the job in progress and ends the thread."""
        self._jobs.put(None)
        self._thread.join(timeout_secs)
        if self._thread.is_alive():
            _log.warning(
                "The last %s was not written within %.0f s; it is given up. "
                "Is its storage out of reach?",
                self._job,
                timeout_secs,
            )

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # Training must not end for a file.
                _log.exception("The %s failed; training goes on.", self._job)
            finally:
                self._idle.release()
