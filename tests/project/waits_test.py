"""A test ends when nothing happens any more, and not when it is slow."""

import signal
import time

import pytest

from tests.cases import tasks
from tests.cases import waits

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.usefixtures("no_process_left"),
]
_SLOW = """
connect()
for step in range(15):
    signs.own().say(signs.STEP)
    time.sleep(0.2)
"""
_HANGING = """
def the_place():
    time.sleep(600)
connect()
signs.own().say(signs.STEP)
print("last words", flush=True)
the_place()
"""


@pytest.mark.slow("a run of pytest that waits, and one that hangs")
def test_slow_progress_ends_nothing_and_a_hang_is_told_with_its_place(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(waits, "QUIET_SECS", 2.0)
    topology = tasks.topology(tmp_path, _SLOW)
    assert tasks.run(topology).exit_code == 0
    topology = tasks.topology(tmp_path, _HANGING, num_groups=2, stuck_secs=0)
    with pytest.raises(pytest.fail.Exception) as caught:
        tasks.run(topology)
    said = str(caught.value)
    for words in ("the run: nothing has", "last words", "in the_place"):
        assert words in said
    for group in range(2):
        assert f"group_{group}_worker_0.log" in said
        assert f"\n{group}_worker_0: step, report 1" in said


def test_a_phase_in_which_nothing_happens_is_ended(monkeypatch):
    monkeypatch.setattr(waits, "QUIET_SECS", 0.4)
    monkeypatch.setattr(waits, "_LEAST_SHARE", 0.9)
    with pytest.raises(pytest.fail.Exception, match="call of .* nothing has"):
        while True:  # By what conftest.py has for each phase.
            signal.raise_signal(signal.SIGALRM)
            time.sleep(0.1)
