"""Tests of programs: what options may look like, exit codes, and logs."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from tfdistill.system import programs

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def _define(options):
    options.add("dir", "<DIR>: where", required=True)
    options.section("numbers")
    options.add("num_rounds", "turns, 100% of them", 3, quick=1)
    options.add("wait_secs", "a time", 2.0, kind=programs.positive)
    options.add("kind", "which", "a", enum_values=("a", "b"))
    options.add("sizes", "some", [2, 5], quick=[2])
    options.add("change", "<NAME=VALUE>: a change", [])
    options.add("no_check", "check nothing", False)


def _program(**changes):
    def run(options):
        if options.num_rounds == 13:
            raise programs.UsageError("no luck")
        return options.num_rounds

    fields = dict(name="prog", about="Runs.", define=_define, run=run)
    return programs.Program(**fields | changes)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {"num_rounds": 3, "sizes": [2, 5], "no_check": False}),
        ("--num-rounds=4 --no-check", {"num_rounds": 4, "no_check": True}),
        ("--change=a-b=--c --change=d", {"change": ["a-b=--c", "d"]}),
        ("--sizes 7 8", {"sizes": [7, 8]}),
        ("--quick --sizes=5", {"num_rounds": 1, "sizes": [5]}),
    ],
)
def test_options_take_dashes_repeats_and_several_words(text, expected):
    options = _program().parse(["--dir=x", *text.split()])
    assert {name: getattr(options, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the following arguments are required: --dir"),
        (
            "--dir=x --num-round=2",
            "unknown arguments: --num-round=2. Did you mean --num-rounds?",
        ),
        ("--dir=x --num=2", "Did you mean --num-rounds?"),
        ("--dir=x --frobnicate", "unknown arguments: --frobnicate"),
        ("--dir=x --num_rounds=13", "no luck"),
    ],
)
def test_wrong_options_end_with_2(refused, text, message):
    said = refused(_program().main, *text.split())
    assert said.startswith("usage: prog [options] prog: error: ")
    assert message in said


_PROGRAM = """
import logging, os, sys
from absl import logging as absl_logging
from tfdistill.system import programs

def run(options):
    logging.getLogger("tfdistill.x").info("library info")
    logging.getLogger("tfdistill.x").warning("library warning")
    absl_logging.info("program info")
    if len(options.command) == 2:
        os.kill(os.getpid(), int(options.command[1]))
    if options.command == ["raise"]:
        raise RuntimeError("no luck")
    return int(options.command[0])

programs.Program(
    name="prog",
    about="Does this.",
    define=lambda options: None,
    run=run,
    takes_command=True,
).start()
"""


def _run(*argv):
    return subprocess.run(
        [sys.executable, "-c", _PROGRAM, *argv],
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["--", "raise"], 1),
        (["--", "0", str(int(signal.SIGTERM))], -signal.SIGTERM),
    ],
)
def test_exit_code(argv, code):
    assert _run(*argv).returncode == code


def test_logs_are_the_programs_own_and_warnings_of_libraries():
    warning, info = _run("--", "0").stderr.splitlines()
    assert warning.endswith("] library warning")
    assert info.endswith("] program info")
    assert "library info" in _run("--verbosity=1", "--", "0").stderr
    assert _run("--verbosity=-2", "--", "0").stderr == ""
