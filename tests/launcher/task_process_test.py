"""Tests that a task cannot outlive its launcher, nor its children itself."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.cases import tasks
from tests.cases import waits
from tfdistill.launcher import task_process

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.usefixtures("no_process_left"),
]
# A task with a child in its own group and one in a session of its own; prints
# their pids, then waits.
FAMILY = """
import os, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
near = subprocess.Popen(sleep)
far = subprocess.Popen(sleep, start_new_session=True)
print(os.getpid(), near.pid, far.pid, flush=True)
"""
WAIT = "time.sleep(600)\n"


@pytest.fixture
def start(tmp_path):
    started = []

    def act(*command, **env):
        log = tmp_path / f"{len(started)}.log"
        with log.open("wb") as file:
            process = task_process.TaskProcess(
                command, env=os.environ | env, log_file=file
            )
        process.log = log
        started.append(process)
        return process

    yield act
    for process in started:
        process.kill()


def _python(code):
    return sys.executable, "-c", code


def _finish(process):
    def closed():
        process.read()
        return process.closed

    waits.until(closed)
    return process.exit_code


def _family(log):
    return [int(pid) for pid in waits.until(lambda: log.read_text().split())]


def test_program_that_does_not_exist(start):
    process = start("/no/such/program")
    assert _finish(process) == 127
    assert "/no/such/program: No such file" in process.log.read_text()


def test_stop_may_be_ignored_but_not_kill(start):
    code = "import signal; signal.signal(15, signal.SIG_IGN)\n"
    process = start(*_python(code + FAMILY + WAIT))
    pids = _family(process.log)
    process.request_stop()
    time.sleep(0.2)
    process.read()
    assert process.exit_code is None and tasks.alive(pids[0])
    process.kill()
    assert process.closed and process.exit_code == -signal.SIGKILL
    assert not any(tasks.alive(pid) for pid in pids)
    process.kill()  # Again: nothing happens.
    process.request_stop()


def test_killed_keeper_takes_the_task_along(start):
    process = start(*_python("import time; print(1, flush=True)\n" + WAIT))
    _family(process.log)
    waits.until(lambda: process.read() or process.pid)
    psutil.Process(process.pid).parent().kill()
    assert _finish(process) != 0
    waits.until(lambda: not tasks.alive(process.pid))


def test_launcher_killed_by_sigkill(tmp_path):
    launcher = f"""
import os, time
from tfdistill.launcher import task_process
with open({str(tmp_path / "log")!r}, "wb") as file:
    process = task_process.TaskProcess(
        {_python(FAMILY + WAIT)!r}, env=os.environ, log_file=file
    )
time.sleep(600)
"""
    process = subprocess.Popen(_python(launcher))
    try:
        waits.until((tmp_path / "log").exists)
        pids = _family(tmp_path / "log")
        assert all(tasks.alive(pid) for pid in pids)
    finally:
        process.kill()
        process.wait()
    waits.until(lambda: not any(tasks.alive(pid) for pid in pids))
