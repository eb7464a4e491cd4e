"""A version whose reading has ended this task's process."""

import json
import subprocess
import sys

import pytest

import tfdistill
from tests.cases import codistillation as cases
from tfdistill.exports import saved_model
from tfdistill.system import crash_note

_X, _Y = cases.data()
_CRASH = """
import os, pathlib, sys
from tfdistill.system import crash_note
with crash_note.CrashNote(pathlib.Path(sys.argv[1])).during(sys.argv[2]):
    os.abort()
"""


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDISTILL_WORKDIR", str(tmp_path))
    return tmp_path


def _follower(exchange):
    model = cases.codistill(cases.linear(0), cases.teacher_set(exchange))
    cases.prepare(model, _X, _Y)
    return model


def test_it_is_not_read_again_after_the_restart(workdir):
    exchange = tfdistill.Exchange(workdir / "exchange")
    version = cases.publish(exchange, cases.linear(1), step=5)
    name = f"1/5/{version.manifest.incarnation}"
    path = workdir / "group_0" / ".reading-worker-0"
    died = subprocess.run([sys.executable, "-c", _CRASH, path, name])
    assert died.returncode < 0
    model = _follower(exchange)
    cases.refresh_until(model, lambda: 5 in cases.quarantined(model))
    assert "crashed when it read" in cases.quarantined(model)[5]
    # A later one is, and the note stays for the starts to come.
    cases.publish(exchange, cases.linear(2), step=6)
    cases.load(model, 6)
    assert crash_note.CrashNote(path).crashed == [name]


def test_a_note_lasts_as_long_as_the_reading(workdir, monkeypatch):
    exchange = tfdistill.Exchange(workdir / "exchange")
    version = cases.publish(exchange, cases.linear(1), step=5)
    path = workdir / "group_0" / ".reading-worker-0"
    noted = []
    read = saved_model.read_variables

    def read_noted(*args):
        noted.append(json.loads(path.read_text()))
        return read(*args)

    monkeypatch.setattr(saved_model, "read_variables", read_noted)
    cases.load(_follower(exchange), 5)
    (note,) = noted
    assert note["now"] == f"1/5/{version.manifest.incarnation}"
    assert not path.exists()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
