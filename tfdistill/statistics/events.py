"""Event files, which TensorBoard shows: of a training, or of one point."""

import io
import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from tensorboard.compat.proto import event_pb2
from tensorboard.compat.proto import summary_pb2
from tensorboard.summary.writer import event_file_writer
from tensorboard.summary.writer import record_writer

from tfdistill.system import run_files

_log = logging.getLogger(__name__)
# Points that wait for storage which is full or slow; a step does not.
_MAX_WAITING = 10_000
_FLUSH_SECS = 5.0
_CLOSE_SECS = 30.0


def scalars(values: Mapping[str, float | None]) -> summary_pb2.Summary:
    """Returns values by their tags as a summary, except for None."""
    return summary_pb2.Summary(
        value=[
            summary_pb2.Summary.Value(tag=tag, simple_value=float(value))
            for tag, value in values.items()
            if value is not None
        ]
    )


def write(path: str, values: Mapping[str, float | None], *, step: int) -> None:
    """Writes a whole event file with the values of one step.

    Written again, it replaces the file: TensorBoard shows one point.
    """
    content, now = io.BytesIO(), time.time()
    writer = record_writer.RecordWriter(content)
    for event in (
        event_pb2.Event(wall_time=now, file_version="brain.Event:2"),
        event_pb2.Event(wall_time=now, step=step, summary=scalars(values)),
    ):
        writer.write(event.SerializeToString())
    os.makedirs(os.path.dirname(path), exist_ok=True)
    run_files.write(path, [content.getvalue()])


class SummaryFile:
    """Appends summaries to the event files of one TensorBoard run.

    If storage fails, points are lost until it works again, and go to a new
    file: the failed one may end in half a record, after which TensorBoard reads
    no further.
    """

    def __init__(
        self, directory: str, *, step: int, errors: tuple[type[Exception], ...]
    ) -> None:
        """Opens nothing yet; training resumes at `step`.

        `errors` is what storage may raise; training continues.

        TensorBoard forgets what an earlier training wrote of later steps: its
        writer says so by a session's start, which `tf.summary` cannot write.
        """
        self._directory = directory
        self._step = step
        self._errors = errors
        self._writer: Any = None
        self._failed = False

    def add(self, summary: summary_pb2.Summary, *, step: int) -> None:
        """Hands over a summary, and returns."""
        try:
            if self._writer is None:
                self._writer = event_file_writer.EventFileWriter(
                    self._directory, _MAX_WAITING, _FLUSH_SECS
                )
                start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
                self._write(self._step + 1, session_log=start)
            self._write(step, summary=summary)
        except self._errors as error:
            _log.log(
                logging.INFO if self._failed else logging.WARNING,
                "%s has no summaries for now; training continues: %s",
                self._directory,
                error,
            )
            self._failed, self._step = True, step
            self.close()

    def _write(self, step: int, **what: object) -> None:
        self._writer.add_event(
            event_pb2.Event(wall_time=time.time(), step=step, **what)
        )

    def close(self) -> None:
        """Writes what is left; storage that hangs is waited for so long."""
        writer, self._writer = self._writer, None
        if writer is not None:
            closing = threading.Thread(
                target=self._close, args=(writer,), daemon=True
            )
            closing.start()
            closing.join(_CLOSE_SECS)

    def _close(self, writer: Any) -> None:
        try:
            writer.close()
        except self._errors as error:
            _log.info("%s: not closed: %s", self._directory, error)
