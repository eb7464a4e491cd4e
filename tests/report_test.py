"""The report of a run, from a junit file that pytest itself writes."""

import pathlib
import subprocess
import sys

import pytest

from tests import report

_TESTS = """
import time
import pytest

def busy():
    end = time.process_time() + 0.3
    while time.process_time() < end: pass

def test_quick(): pass

def test_slow(): busy()

@pytest.mark.slow("it sleeps")
def test_slow_and_says_why(): busy()

@pytest.mark.skip
def test_skipped(): pass

def test_failed(): assert False
"""


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    path = directory / "tests" / "some_room" / "of_test.py"
    path.parent.mkdir(parents=True)
    path.write_text(_TESTS)
    conftest = pathlib.Path(__file__).with_name("conftest.py")
    (directory / "pytest.ini").write_text(
        "[pytest]\npython_files = *_test.py\nmarkers = slow(why): it is\n"
    )
    subprocess.run(
        [sys.executable, "-m", "pytest", "--noconftest", "-p", "tests.conftest"]
        + ["--import-mode=importlib", "--junit-xml=xml/one.xml", path],
        cwd=directory,
        env={"PYTHONPATH": str(conftest.parents[1])},
        capture_output=True,
    )
    return report.read(directory / "xml")


def test_slow_tests_must_say_why(cases, monkeypatch):
    assert not report.over_budget(cases)
    monkeypatch.setattr(report, "BUDGET_SECS", 0.25)
    (line,) = report.over_budget(cases)
    assert "of_test.py::test_slow took 0." in line


def test_one_line_closes_all_stages(cases, capsys):
    line = report.closing_line(cases, "7", has_failed=True).strip("= ")
    assert line == "1 failed, 3 passed, 1 skipped in 7.00s"
    fine = [case for case in cases if case.result == "passed"]
    line = report.closing_line(fine, "7", has_failed=True).strip("= ")
    assert line == "3 passed, 1 error in 7.00s"
    assert "no tests ran" in report.closing_line([], "7", has_failed=False)
    assert {case.room for case in cases} == {"some_room"}
