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

    def act(code, **env):
        process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + code],
            env={**os.environ, "TFDISTILL_GROUP": "0", **env},
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


@pytest.mark.parametrize(
    "wait",
    [
        "time.sleep(600)",
        "threading.Thread(target=time.sleep, args=[600]).start()",
        # In C, without Python's lock, and going on after each signal.
        "[ctypes.CDLL(None).sleep(600) for _ in range(9)]",
        # With no end, in Python.
        "[... for _ in iter(int, 1)]",
    ],
)
def test_a_task_ends_whatever_it_waits_for(start, wait):
    process = start(f"ending.install()\nready()\n{wait}")
    code, said = _terminate(process)
    assert code == 75
    assert "SIGTERM: this task ends at once" in said


def test_a_handler_that_was_put_there_in_c_is_replaced(start):
    # As TensorFlow does: it notes the signal and goes on.
    process = start(
        "ending.install()\n"
        "ctypes.CDLL(None).signal(15, ctypes.c_void_p(1))\n"
        "ending.install()\nready()\ntime.sleep(600)"
    )
    assert _terminate(process)[0] == 75


def test_a_handler_of_the_programs_own_stays_in_charge(start):
    process = start(
        "signal.signal(15, lambda *_: sys.exit(7))\n"
        "ctypes.CDLL(None).signal(15, ctypes.c_void_p(1))\n"
        "assert not ending.install()\nready()\ntime.sleep(600)"
    )
    assert _terminate(process)[0] == 7


def test_nothing_is_changed_without_a_launcher(start):
    process = start(
        "assert not ending.install({})\nready()\ntime.sleep(600)",
    )
    assert _terminate(process)[0] == -signal.SIGTERM


def test_a_backup_has_it_end_without_a_launcher(start):
    process = start(
        "assert ending.install({}, always=True)\nready()\ntime.sleep(600)",
    )
    assert _terminate(process)[0] == 75


def test_a_block_may_come_to_a_good_end(start):
    process = start(
        """
ending.install()
with ending.deferred():
    ready()
    while not ending.requested():
        time.sleep(0.01)
    print("saved", flush=True)
    ending.finish()
"""
    )
    code, said = _terminate(process)
    assert code == 75
    assert said.startswith("saved\n")
    assert "ends at the end of a step" in said


def test_but_not_for_ever(start):
    process = start(
        "ending.GRACE_SECS = 0.3\n"
        "ending.install()\n"
        "with ending.deferred():\n    ready()\n    time.sleep(600)"
    )
    assert _terminate(process)[0] == 75


def test_an_end_by_itself_after_the_signal_counts_as_one(start):
    process = start(
        """
ending.install()
with ending.deferred():
    ready()
    while not ending.requested():
        time.sleep(0.01)
time.sleep(600)
"""
    )
    assert _terminate(process)[0] == 75


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
