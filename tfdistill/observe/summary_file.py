"""TensorBoard's files of summaries, written without a wait in training."""

import collections
import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdistill.observe import best_effort
from tfdistill.system import background

_log = logging.getLogger(__name__)
_VERSION = "brain.Event:2"
# Summaries that wait for storage which is full or slow; later ones are lost.
_MAX_WAITING = 2000
# Distinguishes files of one process in one second, and orders them.
_numbers = itertools.count()
Scalars = dict[str, float]
# Unix seconds, step, and what to write.
_Waiting = tuple[float, int, bytes | Scalars]


class SummaryFile:
    """Appends summaries to the event files of one TensorBoard run.

    A separate thread writes them. If storage fails, what was not written
    waits for the next time, in a new file: the failed one may end in half a
    record, after which TensorBoard reads no further.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        step: int,
        clock: Callable[[], float] = time.time,
        open_writer: Callable[[str], Any] = tf.io.TFRecordWriter,
    ) -> None:
        """Starts the thread; training resumes at `step`.

        TensorBoard forgets what an earlier training wrote of later steps.
        """
        self._directory = os.fspath(directory)
        self._clock = clock
        self._open_writer = open_writer
        self._restart_step = step + 1
        self._lock = threading.Lock()
        self._waiting: collections.deque[_Waiting] = collections.deque()
        self._writer: Any = None
        self._thread = background.OneJobThread(
            "tfdistill-summaries", job="summary"
        )
        # Times that storage failed, and summaries that were lost by it.
        self.num_failures = self.num_lost = 0

    def add(self, summary: bytes | Scalars, *, step: int) -> None:
        """Hands over scalars by tag or a serialized summary, and returns."""
        with self._lock:
            if len(self._waiting) >= _MAX_WAITING:
                self.num_lost += 1
                return
            self._waiting.append((self._clock(), step, summary))
        # Unless the thread is at it already.
        self._thread.submit(self._write, wait_secs=0.0)

    def close(self, timeout_secs: float = 30.0) -> None:
        """Writes what is left and ends the thread."""
        deadline = time.monotonic() + timeout_secs
        if self._thread.wait_idle(timeout_secs):
            self._thread.submit(self._finish, wait_secs=0.0)
        self._thread.close(max(0.0, deadline - time.monotonic()))
        with self._lock:
            self.num_lost += len(self._waiting)
        if self.num_lost:
            _log.warning(
                "%s lacks %d summaries: its storage was full or too slow.",
                self._directory,
                self.num_lost,
            )

    # ---- on the thread ----

    def _finish(self) -> None:
        self._write()
        self._close_writer()

    def _write(self) -> None:
        with self._lock:
            waiting = list(self._waiting)
        if not waiting:
            return
        events = list(map(_event, waiting))
        try:
            writer = self._writer or self._open(events)
            self._writer = writer
            for event in events:
                writer.write(event.SerializeToString())
            writer.flush()
        except best_effort.STORAGE_ERRORS as error:
            self._failed(error)
            return
        with self._lock:
            for _ in events:
                self._waiting.popleft()

    def _open(self, events: list[tf.compat.v1.Event]) -> Any:
        """Opens a new file, which takes the place of what comes after it."""
        if self.num_failures:
            # Some of these may stand in the file that failed.
            self._restart_step = min(event.step for event in events)
        tf.io.gfile.makedirs(self._directory)
        now = self._clock()
        name = (
            f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}."
            f"{os.getpid()}.{next(_numbers):04d}"
        )
        writer = self._open_writer(os.path.join(self._directory, name))
        for head in (
            {"file_version": _VERSION},
            {
                "step": self._restart_step,
                "session_log": tf.compat.v1.SessionLog(
                    status=tf.compat.v1.SessionLog.START
                ),
            },
        ):
            event = tf.compat.v1.Event(wall_time=now, **head)
            writer.write(event.SerializeToString())
        return writer

    def _failed(self, error: Exception) -> None:
        self.num_failures += 1
        _log.log(
            logging.INFO if self.num_failures > 1 else logging.WARNING,
            "%s lacks summaries for now, training goes on: %s: %s",
            self._directory,
            type(error).__name__,
            error,
        )
        self._close_writer()

    def _close_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.close()
            except best_effort.STORAGE_ERRORS as error:
                _log.info("%s: not closed: %s", self._directory, error)


def _event(waiting: _Waiting) -> tf.compat.v1.Event:
    wall_time, step, given = waiting
    if isinstance(given, bytes):
        summary = tf.compat.v1.Summary.FromString(given)
    else:
        summary = tf.compat.v1.Summary(
            value=[
                tf.compat.v1.Summary.Value(tag=tag, simple_value=value)
                for tag, value in given.items()
            ]
        )
    return tf.compat.v1.Event(wall_time=wall_time, step=step, summary=summary)
