"""Bounds the waits that TensorFlow leaves unbounded.

A worker waits for its peers at the start without a limit, and in a collective
for as long as a peer is alive, even if it is stuck. TensorFlow's own limit for
collectives keeps two threads for each until it has run out, thousands of them
at a few collectives a step. One thread that looks at the clock does it.
"""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from collections.abc import Iterable
from typing import Any

import keras

from tfdistill import keras_internals
from tfdistill import tcp_probe

# Worth a retry: a peer was lost.
EXIT_CODE = 75


def limit_from_env(name: str, default: float) -> float:
    """Reads a time limit in seconds from the environment.

    Args:
        name: Of the variable.
        default: Where it is not set.

    Returns:
        Seconds; 0 means no limit.

    Raises:
        ValueError: It is not a number >= 0.
    """
    text = os.environ.get(name, "")
    try:
        secs = float(text) if text else default
    except ValueError:
        secs = -1.0
    if not 0 <= secs < float("inf"):
        raise ValueError(
            f"{name} must be a number of seconds >= 0 (0 for no limit); "
            f"received {text!r}."
        )
    return secs


class Watchdog:
    """Ends the process when nothing was heard of for too long."""

    def __init__(
        self,
        limit_secs: float,
        explain: Callable[[], str],
        *,
        end: Callable[[int], Any] = os._exit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts nothing yet.

        Args:
            limit_secs: Longest silence in seconds; 0 for no limit.
            explain: Says what was waited for, and what to do.
            end: Ends the process with an exit code. The default skips every
                clean-up: a thread that hangs in TensorFlow cannot be asked.
            clock: Seconds that never go backwards.
        """
        self._limit_secs = limit_secs
        self._explain = explain
        self._end = end
        self._clock = clock
        self._stopped = threading.Event()
        self._heard = clock()

    def touch(self) -> None:
        """Says that there was progress."""
        self._heard = self._clock()

    def __enter__(self) -> "Watchdog":
        self.touch()
        if self._limit_secs:
            threading.Thread(
                target=self._watch, name="tfdistill-watchdog", daemon=True
            ).start()
        return self

    def __exit__(self, *details: Any) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(min(1.0, self._limit_secs / 4)):
            if self._clock() - self._heard > self._limit_secs:
                print(f"tfdistill: {self._explain()}", file=sys.stderr)
                faulthandler.dump_traceback(all_threads=True)
                sys.stderr.flush()
                self._end(EXIT_CODE)
                return


class StepWatchdog(keras.callbacks.Callback):
    """A watchdog over `fit`: any batch or epoch counts as progress."""

    def __init__(self, watchdog: Watchdog) -> None:
        """Watches from the start of training to its end.

        Args:
            watchdog: Not yet started.
        """
        super().__init__()
        self._watchdog = watchdog

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts the watch."""
        self._watchdog.__enter__()

    def on_train_end(self, logs: Any = None) -> None:
        """Ends the watch."""
        self._watchdog.__exit__()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts as progress."""
        self._watchdog.touch()

    on_test_batch_end = on_train_batch_end

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Counts as progress."""
        self._watchdog.touch()


def over_steps(strategy: Any) -> StepWatchdog:
    """Makes the watchdog of one worker's `fit`.

    Args:
        strategy: A strategy over several workers.

    Returns:
        A callback that ends a worker which has made no step for
        `TFDISTILL_STALL_TIMEOUT_SECS`, by default half an hour.
    """
    limit_secs = limit_from_env("TFDISTILL_STALL_TIMEOUT_SECS", 1800.0)
    jobs = keras_internals.jobs_of(strategy)
    addresses = [address for job in jobs.values() for address in job]

    def explain() -> str:
        missing = ", ".join(unreachable(addresses)) or "none"
        return (
            f"no step was finished in {limit_secs:.0f} s, so a worker of the "
            f"group is stuck. Workers that do not answer: {missing}. Where "
            "each thread of this one stands is below. Steps, evaluations and "
            "callbacks that take longer need a higher "
            "TFDISTILL_STALL_TIMEOUT_SECS (0 for no limit)."
        )

    return StepWatchdog(Watchdog(limit_secs, explain))


def unreachable(addresses: Iterable[str]) -> list[str]:
    """Finds the tasks that nobody listens for.

    Args:
        addresses: `host:port` of each.

    Returns:
        Those that do not take a connection within two seconds.
    """
    return [
        address
        for address in addresses
        if tcp_probe.ask(address) is not tcp_probe.Answer.OPEN
    ]
