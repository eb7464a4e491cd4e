"""`tfdistill line`: a model from one retrain to the next, by its commands."""

import json
import pathlib
import sys
import types

import pytest
from tensorboard.backend.event_processing import event_accumulator

from launch import line as launched
from tests.cases import lines
from tfdistill.commands import main
from tfdistill.contrib import line as room
from tfdistill.contrib.line import gate as gate_lib
from tfdistill.contrib.line import store

_COMMAND = main.load("line")
_WORKLOAD = '''
def workload(spans=(), learning_rate=0.1):
    """Returns nothing: these candidates are not trained."""
'''


class _Gate:
    """Judges as it is told."""

    verdict, live = "promote", "hold"
    HOLD = gate_lib.HOLD

    def judge(self, line, number):
        return {
            "verdict": self.verdict,
            "reasons": [f"{number} is what it is."],
            "figures": {"candidate": {"log_loss": 0.4 + number / 100}},
            "estimates": {"churn": {"value": 0.01}} if number > 1 else {},
            "expected": {"log_loss": 0.4},
        }

    def live_verdict(self, line, more):
        reports = [*line.journal.events("report"), *more]
        assert reports[-1]["log_loss"] == 0.9
        return self.live, [f"{len(reports)} reports."]


@pytest.fixture
def gate(monkeypatch):
    """A gate and a retrain that take no time."""
    made = _Gate()

    def run(line, *, span, again, **options):
        number = line.start_candidate(span, again=again)
        if not line.is_trained(number):
            lines.add_candidate(line, span)
        return number

    def files_of(line, number):
        run = f"{line.candidate_path(number)}/run"
        return f"{run}/exchange/group_0/{10 * number}", lines.extra(
            line, number
        )

    retrain = types.SimpleNamespace(run=run, files_of=files_of)
    for name, stub in {"gate": made, "retrain": retrain}.items():
        monkeypatch.setitem(sys.modules, f"tfdistill.contrib.line.{name}", stub)
        monkeypatch.setattr(room, name, stub, raising=False)
    return made


@pytest.fixture
def place(tmp_path):
    (tmp_path / "my_workload.py").write_text(_WORKLOAD)
    place = tmp_path / "clicks"
    assert _call("init", place, tmp_path / "my_workload.py") == 0
    return place


def _call(name, place, *options):
    return _COMMAND.main([name, str(place), *map(str, options)])


def _day(place, day):
    assert _call("retrain", place, f"--span=day_{day}") == 0
    assert _call("judge", place) == 0
    assert _call("promote", place) == 0


def test_a_model_over_some_days(place, gate, capsys):
    for day in (1, 2):
        _day(place, day)
    # Each command that is repeated says that there is nothing left to do.
    for options, hint in (
        (("retrain", place, "--span=day_2"), "already trained on day_2"),
        (("promote", place), "already promoted"),
    ):
        capsys.readouterr()
        assert _call(*options) == 0
        assert hint in capsys.readouterr().out
    # The first version stays, however bad it is.
    live = ("--version=2", "--log-loss=.9", "--examples=5000", "--dry-run")
    for gate.live, code in (("hold", 0), ("promote", 0), ("worse", 3)):
        assert _call("report", place, *live) == code
    gate.live = "roll back"
    live = ("--version=2", "--log-loss=.9", "--examples=5000", "--since=noon")
    assert _call("report", place, *live, "--dry-run") == 4
    assert _call("report", place, *live, "--examples=0") == 1
    assert store.Line(place).promoted() == 2
    assert [_call("report", place, *live) for _ in range(2)] == [4, 4]
    assert store.Line(place).promoted() == 1
    assert _call("rollback", place) == 0
    capsys.readouterr()
    assert _call("log", place, "--json") == 0
    events = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    kinds = ["retrain", "judge", "promote"] * 2 + ["report", "rollback"]
    assert [event["what"] for event in events] == ["init", *kinds]
    assert events[-1]["why"] == "1 reports."
    assert _call("status", place) == 0
    page = capsys.readouterr().out
    rows = [line.split() for line in page.splitlines() if "day_" in line]
    first, second = " ".join(rows[0]), " ".join(rows[1])
    assert first == "1 day_1 - 0.4100 - 0.0200 1,000 - - promote promoted"
    assert second == (
        "2 day_2 - 0.4200 0.0100 0.0200 1,000 yes 0.9000 promote rolled back"
    )
    assert "Version 1 has been promoted since 20" in page
    shown = event_accumulator.EventAccumulator(f"{place}/tensorboard/promoted")
    shown.Reload()
    points = [(p.step, p.value) for p in shown.Scalars("line/log_loss")]
    assert points == [(1, pytest.approx(0.41)), (2, pytest.approx(0.42))]


def test_what_is_held_stale_or_of_another_model_is_refused(
    place, gate, tmp_path, caplog, capsys
):
    _day(place, 1)
    assert _call("retrain", place, "--span=day_2") == 0
    assert _call("promote", place) == 1
    assert "was not judged" in caplog.text
    gate.verdict = "hold"
    assert _call("judge", place) == 3
    assert _call("promote", place) == 1
    assert "Candidate 2 was held: 2 is what it is." in caplog.text
    gate.verdict = "promote"
    assert _call("judge", place) == 0
    assert _call("retrain", place, "--span=day_3", "--again") == 0
    assert _call("judge", place) == 0
    assert _call("promote", place) == 0
    assert _call("promote", place, "--number=2") == 1
    assert "was compared with version 1, and 3 is promoted" in caplog.text
    other = tmp_path / "other.py"
    other.write_text(_WORKLOAD)
    with pytest.raises(SystemExit):
        _call("judge", place, other)
    assert f"received {other}" in capsys.readouterr().err
    other.write_text(_WORKLOAD.replace("spans=(), ", ""))
    with pytest.raises(SystemExit):
        _call("init", tmp_path / "other", other)
    assert "must have the argument `spans`" in capsys.readouterr().err
    # Held, and promoted by somebody who knows better.
    gate.verdict = "hold"
    assert _call("retrain", place, "--span=day_4") == 0
    assert _call("judge", place) == 3
    assert _call("promote", place, "--force", "--why=a new product") == 0
    assert store.Line(place).journal.pointer()["why"] == "a new product"


def test_a_line_in_a_bucket(gate, tmp_path):
    (tmp_path / "my_workload.py").write_text(_WORKLOAD)
    place = f"memory://bucket/{tmp_path.name}"
    assert _call("init", place, tmp_path / "my_workload.py") == 0
    work = f"--workdir={tmp_path / 'work'}"
    for day in (1, 2):
        for name in ("retrain", "judge", "promote"):
            options = [f"--span=day_{day}"] * (name == "retrain")
            assert _call(name, place, *options, work) == 0
    assert _call("retrain", place, "--span=day_3") == 1
    for name in ("rollback", "log", "status"):
        assert _call(name, place) == 0
    assert store.Line(place).promoted() == 1
    copied = pathlib.Path(
        store.Line(place, workdir=tmp_path / "w").local_version(1)
    )
    assert (copied / "saved_model.pb").exists()


def test_help_is_one_screen_and_wrong_words_have_a_hint(capsys):
    with pytest.raises(SystemExit):
        launched.main([])
    page = capsys.readouterr().out
    assert page.startswith("usage: python -m launch.line COMMAND")
    assert page.count("\n") < 25 and max(map(len, page.splitlines())) <= 80
    with pytest.raises(SystemExit):
        launched.main(["retrian", "x"])
    assert "Did you mean 'retrain'?" in capsys.readouterr().err
