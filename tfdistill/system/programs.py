"""A command-line program: argparse with absl's options, and exit codes."""

import argparse
import contextlib
import copy
import dataclasses
import difflib
import faulthandler
import functools
import inspect
import logging as python_logging
import math
import os
import re
import sys
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NoReturn
from typing import Self

from absl import app
from absl import flags
from absl import logging
from absl.flags import argparse_flags

from tfdistill.system import extras

EXIT_FAILURE, EXIT_OPTIONS, EXIT_PIPE = 1, 2, 141
_WIDTH = 80
# The first word of a script's command: whatever Python its tasks have.
PYTHON = ""
# The values of all options by name, and of the command.
Options = argparse.Namespace
# Raised by a running program when its options turn out to be wrong.
UsageError = app.UsageError


@contextlib.contextmanager
def usage_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Makes a UsageError of these errors; default: OSError and ValueError."""
    kinds = kinds or (OSError, ValueError)
    try:
        yield
    except kinds as error:
        raise UsageError(str(error)) from error


def positive(text: str) -> float:
    """Reads an option that must be finite and above zero."""
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"must be > 0; received {text}")
    return float(text)


def count(text: str) -> int:
    """Reads an option that must be a number of things, at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be >= 1; received {text}")
    return int(text)


_NUMBERS: Mapping[Any, str] = {int: "N", float: "X", positive: "X"}


class Program(argparse_flags.ArgumentParser):
    """The parser of a program's options, and what the program runs.

    Args:
        name: As it is called, such as `tfdistill run`.
        about: What it does.
        define: Adds its options.
        run: Returns the exit code.
        usage: Arguments after the name, a line for each form.
        notes: The end of `--help`, printed as it is.
        takes_command: Whether a script, or what follows the first `--`, is a
            command: it becomes the option `command`.
        takes_file: The meaning of a .py file among the options. It becomes the
            option `file`, and what follows the first `--` its arguments,
            `command`.
        needs: Packages of an extra, without which it doesn't begin.
        reports: Errors that are one line and exit code 1, not a traceback. An
            output that is closed early, as by `head`, is 141 then.
    """

    def __init__(
        self,
        *,
        name: str,
        about: str,
        define: Callable[["Program"], None],
        run: Callable[[Options], int],
        usage: str = "[options]",
        notes: str = "",
        takes_command: bool = False,
        takes_file: str = "",
        needs: Sequence[str] = (),
        reports: tuple[type[Exception], ...] = (),
    ) -> None:
        forms = usage.replace("%", "%%").replace("\n", "\n       %(prog)s ")
        super().__init__(
            prog=name,
            usage=f"%(prog)s {forms}",
            description=inspect.cleandoc(about),
            epilog=notes,
            allow_abbrev=False,
            conflict_handler="resolve",  # TensorFlow's options and absl's.
            formatter_class=functools.partial(
                argparse.RawDescriptionHelpFormatter,
                width=_WIDTH,
                max_help_position=27,
            ),
        )
        self._run, self._needs, self._reports = run, needs, reports
        self._takes_command, self._takes_file = takes_command, bool(takes_file)
        self._quick: dict[str, Any] = {}
        self._section: Any = self
        if takes_file:
            self.add_argument(
                "file", nargs="?", metavar="FILE.py", help=takes_file
            )
        define(self)
        if self._quick:
            self.add("quick", "faster and less exact", False)

    def section(self, title: str) -> None:
        """Puts what is added from now on under a heading of `--help`."""
        self._section = self.add_argument_group(title)

    def add(
        self,
        name: str,
        text: str,
        default: object = None,
        *,
        kind: Callable[[str], Any] | None = None,
        enum_values: Sequence[str] | None = None,
        required: bool = False,
        quick: object = None,
    ) -> None:
        """Adds an option, one that may be repeated if its default is `[]`.

        A text that begins with `<DIR>: ` gives the value a name. With `quick`
        values the program has `--quick`, for which these are the defaults.
        """
        many = default if isinstance(default, list) else [default]
        named = re.match(r"<(\S+)>: ", text)
        text = text[named.end() :] if named else text
        shown = [str(one) for one in many if one is not None]
        if shown and default is not False and "default" not in text:
            text += f" (default {', '.join(shown)})"
        more: dict[str, Any] = {"action": "store_true"}
        if default is not False:
            kind = kind or (str if many in ([], [None]) else type(many[0]))
            number = None if enum_values else _NUMBERS.get(kind)
            more = {
                "type": kind,
                "choices": enum_values,
                "metavar": named[1] if named else number,
                "required": required,
            }
        if isinstance(default, list):
            more |= {"nargs": "+", "action": "store" if default else "extend"}
        self._section.add_argument(
            f"--{dashed(name)}",
            default=default,
            help=text.replace("%", "%%"),
            **more,
        )
        if quick is not None:
            self._quick[name] = quick

    def named(self, name: str) -> Self:
        """Returns the same program, called by another name."""
        made = copy.copy(self)
        made.prog = name
        return made

    def start(self) -> NoReturn:
        """Runs the program with the arguments of this process, and exits."""
        was_on = faulthandler.is_enabled()

        def parse(argv: Sequence[str]) -> tuple[Options, bool]:
            options = self.parse(argv[1:])
            return options, flags.FLAGS["verbosity"].using_default_value

        def run(parsed: tuple[Options, bool]) -> int:
            options, is_quiet = parsed
            if not was_on:
                # The stacks of all threads would push TensorFlow's last words
                # out of the end of a log, which is what launchers quote.
                faulthandler.disable()
            if is_quiet:
                # Programs report their progress, libraries only what is wrong.
                logging.get_absl_logger().setLevel(python_logging.INFO)
                python_logging.getLogger().setLevel(python_logging.WARNING)
            return self.run(options)

        app.run(run, flags_parser=parse)
        raise SystemExit(0)

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Runs the program inside this process and returns its exit code.

        Args:
            argv: Arguments without the program's name. Default
                `sys.argv[1:]`.
        """
        return self.run(self.parse(sys.argv[1:] if argv is None else argv))

    def run(self, options: Options) -> int:
        """Returns the exit code: 2 after a `UsageError`, or without an extra.

        `options` are what `parse` returns.
        """
        try:
            with extras.needed_by(self.prog):
                extras.check(*self._needs)
                code = self._run(options)
            if self._reports:
                sys.stdout.flush()
            return code
        except extras.MissingError as error:
            print(error, file=sys.stderr)
            return EXIT_OPTIONS
        except UsageError as error:
            self.error(str(error))
        except self._reports as error:
            if isinstance(error, BrokenPipeError):
                forget_output()
                return EXIT_PIPE
            logging.error("%s", error)
            return EXIT_FAILURE

    def parse(self, argv: Sequence[str]) -> Options:
        """Returns the options; exits with code 2 if an argument is wrong."""
        takes_more = self._takes_command or self._takes_file
        own, command = self._split(argv) if takes_more else (argv, [])
        own = [self._spelled(argument) for argument in own]
        if "--quick" in own:
            self.set_defaults(**self._quick)
        options, unknown = self.parse_known_args(own)
        if unknown:
            hint = self._meant(unknown)
            if self._takes_command and not hint:
                hint = (
                    ". Pass a script without `python`, or put a command after "
                    "`--`"
                )
            self.error(f"unknown arguments: {' '.join(unknown)}{hint}")
        if takes_more:
            options.command = list(command)
            options.program, options.given = self.prog, list(argv)
        return options

    def _split(
        self, arguments: Sequence[str]
    ) -> tuple[Sequence[str], Sequence[str]]:
        """Splits its own arguments from what it runs, or what that takes."""
        for at, argument in enumerate(arguments):
            if argument == "--":
                return arguments[:at], arguments[at + 1 :]
            is_script = argument.endswith(".py") and argument[0] != "-"
            if not is_script or not self._takes_command:
                continue
            before = self._spelled(arguments[at - 1]) if at else ""
            action = self._option_string_actions.get(before)
            if action is None or action.nargs == 0:
                return arguments[:at], [PYTHON, *arguments[at:]]
        return arguments, []

    def _spelled(self, argument: str) -> str:
        """Returns an option with dashes, unless only absl's own is known."""
        name, equals, value = argument.partition("=")
        known = dashed(name) in self._option_string_actions
        return f"{dashed(name)}{equals}{value}" if known else argument

    def _meant(self, unknown: Sequence[str]) -> str:
        """Returns the option that the first unknown one is close to, if any."""
        options = [x.partition("=")[0] for x in unknown if x.startswith("--")]
        wanted = dashed(options[0]) if options else ""
        known = [dashed(x) for x in self._option_string_actions]
        near = [x for x in known if wanted.strip("-") and x.startswith(wanted)]
        near += difflib.get_close_matches(wanted, known, n=1)
        return f". Did you mean {near[0]}?" if near else ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Commands:
    """A program whose first word chooses another one."""

    prog: str
    about: str
    # What each program does, in the order of use.
    commands: Mapping[str, str]
    # Returns the program of a name.
    load: Callable[[str], "Program | Commands"]
    # The end of `--help`, printed as it is.
    notes: str = ""

    def named(self, name: str) -> "Commands":
        """Returns the same program, called by another name."""
        return dataclasses.replace(self, prog=name)

    def start(self) -> NoReturn:
        """Runs the program that this process' arguments name, and exits."""
        program = self._chosen(sys.argv[1:])
        del sys.argv[1]
        program.start()

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Runs the program that the first argument names."""
        argv = sys.argv[1:] if argv is None else argv
        return self._chosen(argv).main(argv[1:])

    def parse(self, argv: Sequence[str]) -> Options:
        """Returns the options of the program that the first argument names."""
        return self._chosen(argv).parse(argv[1:])

    def format_help(self) -> str:
        """Returns the text of `--help`."""
        width = max(map(len, self.commands))
        rows = [f"  {n:<{width}}  {text}" for n, text in self.commands.items()]
        return "\n".join(
            [
                f"usage: {self.prog} COMMAND [options]\n",
                f"{self.about}\n",
                *rows,
                f"\n{self.prog} COMMAND --help lists a command's options.\n",
                self.notes,
            ]
        )

    def _chosen(self, argv: Sequence[str]) -> "Program | Commands":
        first = argv[0] if argv else "--help"
        if first in ("--help", "-h", "help"):
            print(self.format_help(), end="")
            raise SystemExit(0)
        if first in self.commands:
            return self.load(first).named(f"{self.prog} {first}")
        near = difflib.get_close_matches(first, self.commands, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        if first.endswith(".py") and "run" in self.commands:
            hint = f" Did you mean `{self.prog} run {first}`?"
        print(self.format_help(), file=sys.stderr)
        print(
            f"{self.prog}: the first argument must be a command; received "
            f"{first!r}.{hint}",
            file=sys.stderr,
        )
        raise SystemExit(EXIT_OPTIONS)


def dashed(name: str) -> str:
    """Returns an option's name as it is written on a command line."""
    return name.replace("_", "-")


def forget_output() -> None:
    """Drops what cannot be printed, now and at the interpreter's end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
