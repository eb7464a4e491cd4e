"""A line: numbered versions, a pointer that is one file, a lock and a log."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.cases import lines
from tests.cases import object_store
from tfdistill.contrib.line import journal
from tfdistill.contrib.line import locks
from tfdistill.contrib.line import store
from tfdistill.exchange import filesystem
from tfdistill.exports import promotion
from tfdistill.system import processes

_ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(
    params=[
        "directory",
        pytest.param("memory", marks=pytest.mark.deep),
        pytest.param("s3", marks=pytest.mark.deep),
    ]
)
def line(request, tmp_path):
    if request.param == "directory":
        yield lines.make(tmp_path / "clicks")
    elif request.param == "memory":
        made = lines.make("memory://bucket/clicks", workdir=tmp_path / "work")
        yield made
        made._files.remove_tree(made.root)
    else:
        with object_store.serve() as server:
            url = f"{server.url}/clicks"
            yield lines.make(url, workdir=tmp_path / "work")


def _kinds(line):
    return [event["what"] for event in line.journal.events()]


def test_versions_are_promoted_and_rolled_back(line):
    assert line.promoted() is None
    assert [lines.promote(line, f"day_{day}") for day in (1, 2, 3)] == [1, 2, 3]
    text = filesystem.read(
        line._files, f"{line.root}/models.config", max_bytes=9999
    ).decode()
    event, config = text.removeprefix("# ").split("\n", 1)
    assert json.loads(event)["previous"] == 2
    # As TensorFlow Serving reads it: text of a ModelServerConfig.
    assert config.split() == [
        *("model_config_list", "{", "config", "{"),
        *("name:", '"clicks"', "base_path:", f'"{line.root}/versions"'),
        *("model_platform:", '"tensorflow"'),
        *("model_version_policy", "{", "specific", "{", "versions:", "3", "}"),
        *("}", "}", "}"),
    ]
    assert line.lineage(2)["span"] == "day_2"
    version = pathlib.Path(line.local_version(3))
    assert (version / "saved_model.pb").read_bytes() == b"3" * 1000
    assert "# clicks 3" in (version / "README.md").read_text()

    assert line.rollback(why="it is worse") and line.promoted() == 2
    # A rollback that is repeated undoes no other promotion.
    assert not line.rollback() and line.promoted() == 2
    number, path = 3, f"{line.candidate_path(3)}/run/exchange/group_0/30"
    with pytest.raises(store.RefusedError, match="rolled back: it is worse"):
        line.promote(number, path)
    assert line.promote(number, path, force=True) and line.promoted() == 3
    assert line.rollback(1) and not line.rollback(1) and line.promoted() == 1
    with pytest.raises(store.RefusedError, match="before 1: none"):
        line.rollback(3)
    with pytest.raises(store.RefusedError, match="must exceed 1"):
        line.promote(1 - 1, path)
    # Its number is not used again.
    assert line.next_number() == 4
    kinds = ["retrain", "promote"] * 3 + ["rollback", "promote", "rollback"]
    assert _kinds(line) == ["init", *kinds]


def test_a_line_that_was_moved_is_served_from_its_new_place(tmp_path):
    lines.promote(lines.make(tmp_path / "old"), "day_1")
    (tmp_path / "old").rename(tmp_path / "new")
    line = store.Line(tmp_path / "new")
    before = line.journal.pointer()
    # Who reports may see the line in another place than its server.
    line.journal.note("report", version=1)
    pointer = tmp_path / "new" / store.POINTER
    assert f'base_path: "{tmp_path}/old/versions"' in pointer.read_text()
    with line.locked("judge"):
        text = pointer.read_text()
    assert f'base_path: "{tmp_path}/new/versions"' in text
    assert line.journal.pointer() == before


def test_a_candidate_is_made_once_for_a_span(line):
    number = line.start_candidate("day_1")
    assert line.start_candidate("day_1") == number
    assert line.start_candidate("day_1", again=True) == number + 1
    number = lines.promote(line, "day_2")
    # It is in the promoted version; and the next one continues that.
    assert line.start_candidate("day_2") == number
    assert line.start_candidate("day_1") == number + 1
    # On another machine what was promoted is there, and no candidate is.
    if not line.is_local:
        other = store.Line(line.root, workdir=f"{line.work}/other")
        assert other.start_candidate("day_2") == number
        assert other.is_trained(number)
        assert other.start_candidate("day_1") == number + 2


def test_another_line_is_not_overwritten(tmp_path):
    lines.make(tmp_path)
    with pytest.raises(ValueError, match="belongs to another line"):
        store.Line.init(tmp_path, workload="/other.py")
    with pytest.raises(ValueError, match="Create a line with tfdistill line"):
        store.Line(tmp_path / "elsewhere").journal.settings()


_HOLD = """
import sys
from tfdistill.contrib.line import store
line = store.Line(sys.argv[1])
with line.locked("retrain"):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.mark.multiprocess
def test_two_at_once_are_refused_and_a_dead_one_is_not_missed(tmp_path):
    line = lines.make(tmp_path)
    number, path = lines.add_candidate(line, "day_1")
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path)],
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(store.BusyError) as error:
            line.promote(number, path)
        assert f"`retrain` of process {process.pid}" in str(error.value)
        # What is noted and undone does not wait for hours of training.
        line.journal.note("report", version=1)
    finally:
        process.kill()
        process.communicate()
    assert line.promote(number, path)


def test_a_writer_that_lost_its_lease_writes_nothing(monkeypatch):
    line = lines.make("memory://bucket/leases")
    other = {"token": "x", "pid": 1, "host": "other", "until": 10.0**12}

    def hold(holder):
        text = json.dumps({"fields": holder}).encode()
        line._files.write(f"{line.root}/owner.json", [text])

    with line.journal.writing("report") as add:
        hold(other)
        with pytest.raises(store.BusyError, match="on other holds"):
            add(version=1)
    monkeypatch.setattr(locks, "_LEASE_SECS", 0.3)
    with pytest.raises(store.BusyError, match="on other holds"):
        line.journal.note("report")
    # One of a process that is gone, here or by its time, is taken.
    gone = subprocess.Popen(["true"])
    gone.wait()
    here = {"machine": processes.machine(), "pid": gone.pid}
    for left in (here, {"until": 0}):
        hold({**other, **left})
        line.journal.note("report")
    assert _kinds(line) == ["init", "report", "report"]


def test_what_a_killed_promotion_left_is_completed(tmp_path, monkeypatch):
    """Stops it at each of its steps, as if the process ended there."""
    line = lines.make(tmp_path)
    lines.promote(line, "day_1")
    number, path = lines.add_candidate(line, "day_2")

    class Killed(BaseException):
        pass

    def dies(*arguments, **options):
        raise Killed

    steps = [
        (promotion.publisher.Exchange, "fetch"),
        (promotion.pathlib.Path, "rename"),
        (journal.Journal, "_add"),
        (journal.Journal, "_write_event"),
    ]
    for owner, name in steps:
        with monkeypatch.context() as patch:
            patch.setattr(promotion.shutil, "rmtree", lambda *_, **__: None)
            patch.setattr(owner, name, dies)
            with pytest.raises(Killed):
                line.promote(number, path)
        moved = name == "_write_event"
        assert line.promoted() == (2 if moved else 1)
    assert "promote" not in _kinds(line)[-1:]
    assert not line.promote(number, path)
    assert line.rollback() and line.promoted() == 1
    with pytest.raises(store.RefusedError):
        line.promote(number, path)
    assert _kinds(line)[-2:] == ["promote", "rollback"]
    assert sorted(os.listdir(tmp_path / "versions")) == ["1", "2"]
