"""Programs: what they read, refuse and print, and how a process runs one."""

import contextlib
import io
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

from absl import flags
from absl.testing import parameterized

from tfdistill.system import programs

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def _add_options(options):
    options.section("what")
    options.add("dir", "<DIR>: a place", required=True)
    options.add("count", "how many", 3, lower_bound=0)
    options.add("wait_secs", "how long", 1.5)
    options.check_positive("wait_secs")
    options.section("how")
    options.add("no_check", "trust it", False)
    options.add("kind", "which", "a", enum_values=["a", "b"])
    options.add("change", "<F=V>: a change", [])
    options.add("sizes", "of a turn", [1, 10])


def _program(**changes):
    fields = {
        "name": "prog",
        "about": "Does this.",
        "define": _add_options,
        "run": lambda options: options.count,
    }
    return programs.Program(**fields | changes)


class ProgramTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("slow", "", 25, ["a", "b"]),
        ("quick", "--quick", 3, ["a"]),
        ("what_is_given_counts", "--quick --rounds=25", 25, ["a"]),
        ("before_it_too", "--rounds=9 --sides b --quick", 9, ["b"]),
    )
    def test_quick_stands_for_options_that_are_not_given(
        self, text, rounds, sides
    ):
        def define(options):
            options.add("rounds", "turns", 25, quick=3)
            options.add("sides", "what", ["a", "b"], quick=["a"])

        program = _program(define=define)
        options = program.parse(text.split())
        self.assertEqual((options.rounds, options.sides), (rounds, sides))
        self.assertIn("rough and soon: rounds=3 sides=a", program.help())

    @parameterized.named_parameters(
        ("defaults", "", {"count": 3, "kind": "a", "change": []}),
        ("equals", "--count=4 --kind=b", {"count": 4, "kind": "b"}),
        ("space", "--count 4 --kind b", {"count": 4, "kind": "b"}),
        ("last_one_wins", "--count=4 --count=5", {"count": 5}),
        ("boolean", "--no_check", {"no_check": True}),
        ("boolean_undone", "--no_check --nono_check", {"no_check": False}),
        ("repeated", "--change=a=1 --change=b", {"change": ["a=1", "b"]}),
        ("several_words", "--sizes 2 5 --count=1", {"sizes": [2, 5]}),
        ("repeated_numbers", "--sizes=2 --sizes=5", {"sizes": [2, 5]}),
        ("negative", "--sizes -2", {"sizes": [-2]}),
        ("empty", "--change=", {"change": [""]}),
    )
    def test_reads(self, text, expected):
        options = _program().parse(["--dir=x", *text.split()])
        found = {name: getattr(options, name) for name in expected}
        self.assertEqual(found, expected)

    @parameterized.named_parameters(
        ("unknown", "--cuont=2", "received --cuont=2. Did you mean --count?"),
        ("abbreviated", "--coun=2", "received --coun=2"),
        ("not_a_number", "--count=x", "--count=x: invalid literal"),
        ("too_small", "--count=-1", "-1 is not a non-negative integer"),
        ("not_positive", "--wait_secs=nan", "--wait_secs must be > 0"),
        ("not_a_choice", "--kind=c", "--kind=c: value should be one of <a|b>"),
        ("no_value", "--count", "Missing value for flag --count"),
        ("no_value_here", "--kind --count=2", "received --count=2"),
        ("value_of_a_switch", "--no_check=2", "--no_check=2: "),
        ("word", "more", "expected only options; received more"),
        ("no_file", "--flagfile=/no/file", "/no/file"),
    )
    def test_refuses(self, text, message):
        said = self._refused(_program(), ["--dir=x", *text.split()])
        self.assertIn(message, said)

    def test_refuses_without_what_is_required(self):
        said = self._refused(_program(), [])
        self.assertIn("flag --dir=None", said)
        self.assertStartsWith(said, "usage: prog [options]\nprog: error: ")

    def test_words_and_commands(self):
        program = _program(words=("place",), takes_command=True)
        argv = ["--dir=x", "here", "--count=2", "--", "a", "--count=5", "--"]
        options = program.parse(argv)
        self.assertEqual((options.place, options.count), ("here", 2))
        self.assertEqual(options.command, ["a", "--count=5", "--"])
        said = self._refused(program, ["--dir=x", "--", "a"])
        self.assertIn("expected PLACE; received nothing", said)

    def test_options_from_a_file(self):
        folder = self.enter_context(tempfile.TemporaryDirectory())
        path = pathlib.Path(folder, "options")
        path.write_text("# all\n--dir=x\n--count=7\n")
        program = _program()
        argv = [f"--flagfile={path}"]
        self.assertEqual(program.main(argv), 7)
        self.assertEqual(program.main([*argv, "--count=8"]), 8)

    def test_what_turns_out_wrong_is_refused_too(self):
        def run(options):
            raise programs.UsageError("DIR must be there")

        said = self._refused(_program(run=run), ["--dir=x"])
        self.assertIn("prog: error: DIR must be there", said)

    def test_programs_of_a_process_know_nothing_of_each_other(self):
        first = _program().parse(["--dir=x", "--change=a"])
        second = _program().parse(["--dir=y"])
        self.assertEqual((first.dir, first.change), ("x", ["a"]))
        self.assertEqual((second.dir, second.change), ("y", []))
        self.assertNotIn("wait_secs", flags.FLAGS)

    def _refused(self, program, argv):
        err = io.StringIO()
        with (
            contextlib.redirect_stderr(err),
            self.assertRaises(SystemExit) as caught,
        ):
            program.main(argv)
        self.assertEqual(caught.exception.code, programs.EXIT_OPTIONS)
        return err.getvalue()


_PROGRAM = """
import faulthandler, logging, os, signal, sys, time
from absl import logging as absl_logging
from tfdistill.system import programs

def run(options):
    logging.getLogger("tfdistill.x").info("library info")
    logging.getLogger("tfdistill.x").warning("library warning")
    absl_logging.info("program info")
    absl_logging.debug("program debug")
    for name in ("tensorflow", "keras"):
        code = compile("log.info('theirs')", f"/x/{name}/saved.py", "exec")
        exec(code, {"log": absl_logging})
    print("faulthandler", faulthandler.is_enabled())
    print("SIGTERM", signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
    if len(options.command) == 2:
        sys.stdout.flush()
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


class ProcessTest(parameterized.TestCase):
    @parameterized.parameters(
        (["--", "0"], 0),
        (["--", "75"], 75),
        (["--", "raise"], 1),
        (["--", "0", str(int(signal.SIGTERM))], -signal.SIGTERM),
        (["--workdir=x"], 2),
        (["--help"], 0),
        (["--helpfull"], 0),
    )
    def test_exit_code(self, argv, code):
        self.assertEqual(self._run(*argv).returncode, code)

    def test_logs_go_to_stderr_with_absls_prefix(self):
        done = self._run("--", "0")
        self.assertEqual(done.stdout, "faulthandler False\nSIGTERM True\n")
        warning, info = done.stderr.splitlines()
        self.assertRegex(warning, r"^W\d{4} .*\] library warning$")
        self.assertRegex(info, r"^I\d{4} .*\] program info$")

    def test_verbosity(self):
        said = self._run("--verbosity=1", "--", "0").stderr
        self.assertIn("library info", said)
        self.assertIn("program debug", said)
        said = self._run("--verbosity=-2", "--", "0").stderr
        self.assertEqual(said, "")

    def _run(self, *argv):
        return subprocess.run(
            [sys.executable, "-c", _PROGRAM, *argv],
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
        )
