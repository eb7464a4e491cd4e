"""One job at a time, and pauses between failures."""

import logging
import threading

import pytest

from tfdistill.system import background

_WAIT_SECS = 30.0


@pytest.fixture
def worker():
    thread = background.OneJobThread("test-export")
    yield thread
    thread.close(_WAIT_SECS)


def test_nobody_queues_for_a_busy_thread(worker):
    started, release, ran = threading.Event(), threading.Event(), []

    def first():
        started.set()
        release.wait(_WAIT_SECS)
        ran.append("first")

    assert worker.submit(first, wait_secs=0.0)
    assert started.wait(_WAIT_SECS)
    assert not worker.submit(lambda: ran.append("skipped"), wait_secs=0.0)
    assert not worker.submit(lambda: ran.append("skipped"), wait_secs=0.01)
    release.set()
    assert worker.submit(lambda: ran.append("third"), wait_secs=_WAIT_SECS)
    worker.close(_WAIT_SECS)
    assert ran == ["first", "third"]


def test_as_many_jobs_as_may_be_are_done_in_turn():
    worker = background.OneJobThread("test-export", most=3)
    release, ran = threading.Event(), []
    jobs = [lambda: release.wait(_WAIT_SECS)]
    jobs += [lambda i=i: ran.append(i) for i in range(3)]
    assert [worker.submit(job, wait_secs=0.0) for job in jobs] == [
        *(True, True, True, False)
    ]
    assert not worker.wait_idle(0.01)
    release.set()
    assert worker.wait_idle(_WAIT_SECS) and ran == [0, 1]
    assert worker.submit(jobs[3], wait_secs=None)
    worker.close(_WAIT_SECS)
    assert ran == [0, 1, 2]


def test_closing_gives_up_in_time_and_says_so(caplog):
    worker = background.OneJobThread("test-export")
    release, started = threading.Event(), threading.Event()

    def job():
        started.set()
        release.wait(_WAIT_SECS)

    worker.submit(job, wait_secs=0.0)
    assert started.wait(_WAIT_SECS)
    try:
        with caplog.at_level(logging.WARNING):
            worker.close(0.01)
        assert "abandoned" in caplog.text
    finally:
        release.set()
