"""Tests of files of summaries whose storage fails or hangs."""

import threading

import pytest
import tensorflow as tf

from tests.cases import summaries as summary_cases
from tfdistill.observe import summary_file


def test_after_a_failure_a_new_file_takes_over(tmp_path, caplog):
    full = [True, False]

    def open_writer(*args, **kwargs):
        if full.pop(0):
            raise tf.errors.ResourceExhaustedError(None, None, "full")
        return summary_file.event_file_writer.EventFileWriter(*args, **kwargs)

    file = summary_file.SummaryFile(
        str(tmp_path), step=0, open_writer=open_writer
    )
    for step in (1, 2, 3):
        file.add({"a": float(step)}, step=step)
    file.close()
    assert caplog.text.count("lacks summaries for now") == 1
    assert summary_cases.scalars(tmp_path, "a") == [(2, 2.0), (3, 3.0)]


def test_storage_that_hangs_is_waited_for_once(tmp_path, monkeypatch):
    go_on = threading.Event()

    class Hangs(summary_file.event_file_writer.EventFileWriter):
        def close(self):
            go_on.wait(60)
            super().close()

    monkeypatch.setattr(summary_file, "_CLOSE_SECS", 0.1)
    file = summary_file.SummaryFile(str(tmp_path), step=0, open_writer=Hangs)
    file.add({"a": 1.0}, step=1)
    file.close()
    go_on.set()


@pytest.mark.parametrize("resumed", [3, 5])
def test_tensorboard_forgets_the_steps_after_the_one_resumed_from(
    tmp_path, resumed
):
    for first in (0, resumed):
        file = summary_file.SummaryFile(str(tmp_path), step=first)
        for step in range(first + 1, 8):
            file.add({"a": first + step}, step=step)
        file.close()
    found = summary_cases.scalars(tmp_path, "a")
    assert [step for step, _ in found] == list(range(1, 8))
    assert found[-1] == (7, resumed + 7)
