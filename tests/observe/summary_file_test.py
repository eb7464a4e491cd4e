"""What a storage that hangs costs the end of a training: a bounded wait."""

import threading

from tensorboard.summary.writer import event_file_writer

from tests.cases import summaries as summary_cases
from tfdistill.observe import summary_file


def test_storage_that_hangs_is_waited_for_once(tmp_path, monkeypatch):
    go_on, close = threading.Event(), event_file_writer.EventFileWriter.close

    def hang(writer):
        go_on.wait(60)
        close(writer)

    monkeypatch.setattr(event_file_writer.EventFileWriter, "close", hang)
    monkeypatch.setattr(summary_file, "_CLOSE_SECS", 0.1)
    file = summary_file.SummaryFile(str(tmp_path), step=0)
    file.add(summary_cases.point("a", 1.0), step=1)
    file.close()
    go_on.set()
