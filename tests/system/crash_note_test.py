"""What a process was at when it crashed."""

import subprocess
import sys

import pytest

from tfdistill.system import crash_note

_PROGRAM = """
import os, pathlib, signal, sys, threading, time
from tfdistill.system import crash_note
note = crash_note.CrashNote(pathlib.Path(sys.argv[1]))
print(note.crashed, flush=True)
with note.during("harmless"):
    pass
{}
"""
_CRASHES = {
    "abort": "with note.during('x'): os.abort()",
    "segmentation fault": (
        "import ctypes\nwith note.during('x'): ctypes.string_at(0)"
    ),
}
_OTHERS = {
    "killed": "with note.during('x'): os.kill(os.getpid(), signal.SIGKILL)",
    "an error": "with note.during('x'): raise ValueError",
    "a fault of another thread": (
        "with note.during('x'):\n"
        "    threading.Thread(target=os.abort).start()\n"
        "    time.sleep(60)"
    ),
    "a fault afterwards": "with note.during('x'): pass\nos.abort()",
}


def _run(path, program):
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(program), str(path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout.strip()


@pytest.mark.parametrize("name", _CRASHES)
def test_the_next_starts_know_what_ended_the_process(tmp_path, name):
    path = tmp_path / "group_0" / "note"
    code, _ = _run(path, _CRASHES[name])
    assert code < 0
    for _ in range(2):
        assert _run(path, "") == (0, "['x']")
    assert _run(path, _CRASHES["abort"].replace("'x'", "'y'"))[0] < 0
    assert crash_note.CrashNote(path).crashed == ["x", "y"]


@pytest.mark.parametrize("name", _OTHERS)
def test_nothing_else_is_taken_for_its_fault(tmp_path, name):
    path = tmp_path / "note"
    assert _run(path, _OTHERS[name])[0] != 0
    assert _run(path, "") == (0, "[]")


@pytest.mark.parametrize(
    "text",
    [b"", b"\xff", b"{}", b'{"now": "x", "thread": 3}', b'{"crashed": 7}\n'],
)
def test_what_is_no_note_says_nothing(tmp_path, text):
    path = tmp_path / "note"
    path.write_bytes(text)
    assert crash_note.CrashNote(path).crashed == []


def test_without_a_place_nothing_is_noted(tmp_path):
    with crash_note.CrashNote(None).during("x"):
        pass
    (tmp_path / "file").touch()
    with crash_note.CrashNote(tmp_path / "file" / "note").during("x"):
        pass


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
