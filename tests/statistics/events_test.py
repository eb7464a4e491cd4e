"""Event files: storage that hangs, and a point that is written again."""

import threading

from tensorboard.summary.writer import event_file_writer

from tests.cases import summaries as summary_cases
from tfdistill.statistics import events


def test_storage_that_hangs_is_waited_for_once(tmp_path, monkeypatch):
    go_on, close = threading.Event(), event_file_writer.EventFileWriter.close

    def hang(writer):
        go_on.wait(60)
        close(writer)

    monkeypatch.setattr(event_file_writer.EventFileWriter, "close", hang)
    monkeypatch.setattr(events, "_CLOSE_SECS", 0.1)
    file = events.SummaryFile(str(tmp_path), step=0, errors=(OSError,))
    file.add(summary_cases.point("a", 1.0), step=1)
    file.close()
    go_on.set()


def test_a_point_that_is_written_again_is_one_point(tmp_path):
    path = tmp_path / "run" / "events.out.tfevents.0000000003.line"
    for value in (1.0, 2.0):
        events.write(str(path), {"a": value, "none": None}, step=3)
    assert summary_cases.scalars(path.parent, "a") == [(3, 2.0)]
    assert summary_cases.tags(path.parent) == {"a"}
