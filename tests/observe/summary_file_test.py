"""Tests of files of summaries at their end."""

import threading

import tensorflow as tf

from tfdistill.observe import summary_file


class _Storage:
    """Stands for TensorFlow's writer; fails, or waits to be let go."""

    def __init__(self, *, fails=False, waits=False):
        self.fails = fails
        self.go_on = threading.Event()
        if not waits:
            self.go_on.set()
        self.num_closed = 0

    def __call__(self, path):
        self.go_on.wait(60)
        if self.fails:
            raise tf.errors.ResourceExhaustedError(None, None, "full")
        return self

    def write(self, record):
        """Takes it."""

    def flush(self):
        """Has nothing to do."""

    def close(self):
        self.num_closed += 1


def _file(tmp_path, storage):
    file = summary_file.SummaryFile(tmp_path, step=0, open_writer=storage)
    file.add({"a": 1.0}, step=1)
    return file


def test_the_file_is_closed(tmp_path):
    storage = _Storage()
    file = _file(tmp_path, storage)
    file.close()
    assert storage.num_closed == 1
    assert file.num_lost == 0


def test_what_a_full_disk_has_cost_is_told(tmp_path, caplog):
    file = _file(tmp_path, _Storage(fails=True))
    file.close()
    assert file.num_lost == 1
    assert "lacks 1 summaries" in caplog.text


def test_storage_that_hangs_is_waited_for_once(tmp_path, monkeypatch, caplog):
    storage = _Storage(waits=True)
    file = _file(tmp_path, storage)
    waits = []
    monkeypatch.setattr(file._thread, "close", waits.append)
    file.close(timeout_secs=0.1)
    assert waits == [0.0]  # Nothing is left for the thread's own end.
    assert file.num_lost == 1
    storage.go_on.set()
