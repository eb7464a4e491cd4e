"""Tests of what SIGTERM does to a task without TensorFlow, wherever it is."""

import os
import signal
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.usefixtures("no_process_left"),
]
PRELUDE = """
import ctypes, multiprocessing, os, signal, sys, threading, time
from tfdistill.cluster import ending
def ready():
    print("ready", flush=True)
"""


@pytest.fixture
def start():
    started = []

    def act(code):
        process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + code],
            env={**os.environ, "TFDISTILL_GROUP": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield act
    for process in started:
        with process:  # Closes its pipe, and waits.
            process.kill()


def _terminate(process):
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate()
    return process.returncode, said


_READY = "ready()\ntime.sleep(600)"
# Notes the signal and goes on, as TensorFlow does.
_IN_C = "ctypes.CDLL(None).signal(15, ctypes.c_void_p(1))\n"
_BLOCK = """ending.install()
with ending.deferred():
    ready()
    while not ending.requested():
        time.sleep(0.01)
"""
# By what it shows: a task, its exit code, and what it says.
_TASKS = {
    "whatever it waits for: a thread": (
        "ending.install()\nready()\n"
        "threading.Thread(target=time.sleep, args=[600]).start()",
        (75, "SIGTERM: this task ends at once"),
    ),
    # Without Python's lock, and going on after each signal.
    "whatever it waits for: C": (
        "ending.install()\nready()\n"
        "[ctypes.CDLL(None).sleep(600) for _ in range(9)]",
        (75, "SIGTERM: this task ends at once"),
    ),
    "whatever it does": (
        "ending.install()\nready()\n[... for _ in iter(int, 1)]",
        (75, "SIGTERM: this task ends at once"),
    ),
    "a handler in C is replaced": (
        f"ending.install()\n{_IN_C}ending.install()\n{_READY}",
        (75, ""),
    ),
    "the program's own stays in charge": (
        f"signal.signal(15, lambda *_: sys.exit(7))\n{_IN_C}"
        f"assert not ending.install()\n{_READY}",
        (7, ""),
    ),
    "nothing is changed without a launcher": (
        f"assert not ending.install({{}})\n{_READY}",
        (-signal.SIGTERM, ""),
    ),
    "but for a backup": (
        f"assert ending.install({{}}, always=True)\n{_READY}",
        (75, ""),
    ),
    "a block may come to a good end": (
        f"{_BLOCK}    print('saved', flush=True)\n    ending.finish()",
        (75, "ends at the end of a step"),
    ),
    "but not for ever": (
        "ending.GRACE_SECS = 0.3\nending.install()\n"
        "with ending.deferred():\n    ready()\n    time.sleep(600)",
        (75, ""),
    ),
    "an end after the block counts as one": (
        f"{_BLOCK}time.sleep(600)",
        (75, ""),
    ),
}


@pytest.mark.parametrize("what", _TASKS)
def test_a_task_ends_as_it_should(start, what):
    code, (exit_code, words) = _TASKS[what]
    process = start(code)
    found, said = _terminate(process)
    assert found == exit_code
    assert words in said
    assert said.startswith("saved\n") == ("'saved'" in code)


def test_forked_children_are_ended_as_ever(start):
    process = start(
        """
ending.install()
child = multiprocessing.get_context("fork").Process(
    target=time.sleep, args=[600]
)
child.start()
child.terminate()
child.join()
ready()
print(child.exitcode, ending.requested(), flush=True)
time.sleep(600)
"""
    )
    assert process.stdout.readline() == "-15 False\n"
    assert _terminate(process)[0] == 75
