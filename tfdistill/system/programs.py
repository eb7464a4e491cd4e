"""A command-line program: options by argparse, absl's own, run by absl.app."""

import argparse
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
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NoReturn

from absl import app
from absl import flags
from absl import logging
from absl.flags import argparse_flags

from tfdistill.system import extras

EXIT_OPTIONS = 2
_WIDTH = 80
# The first word of a script's command: whatever Python its tasks have.
PYTHON = ""
# The values of all options by name, and of the command.
Options = argparse.Namespace
# Raised by a running program when its options turn out to be wrong.
UsageError = app.UsageError


def positive(text: str) -> float:
    """Reads an option that must be finite and above zero."""
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"must be > 0; received {text}")
    return float(text)


_NUMBERS: Mapping[Any, str] = {int: "N", float: "X", positive: "X"}


class Flags(argparse_flags.ArgumentParser):
    """A parser whose options have one line each, and their default's type."""

    def __init__(self, **kwargs: Any) -> None:
        shape = functools.partial(
            argparse.RawDescriptionHelpFormatter,
            width=_WIDTH,
            max_help_position=27,
        )
        super().__init__(
            allow_abbrev=False,
            conflict_handler="resolve",  # TensorFlow's options and absl's.
            formatter_class=shape,
            **kwargs,
        )
        self.quick: dict[str, Any] = {}
        self._required: dict[str, str] = {}
        self._section: Any = self

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
        """Adds an option, one that may be repeated if its default is a list.

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
            }
        if isinstance(default, list):
            more |= {"action": _Several, "nargs": "+"}
        if required:
            value = more["metavar"] or name.upper()
            self._required[name] = f"--{dashed(name)}={value}: {text}"
        self._section.add_argument(
            f"--{dashed(name)}",
            default=default,
            help=text.replace("%", "%%"),
            **more,
        )
        if quick is not None:
            self.quick[name] = quick

    def spelled(self, argument: str) -> str:
        """Returns an option with the dashes or underscores that it has."""
        name, equals, value = argument.partition("=")
        if not name.startswith("--"):
            return argument
        plain = name[2:]
        # With underscores, as absl's own are.
        spellings = f"--{dashed(plain)}", f"--{plain.replace('-', '_')}"
        known = self._option_string_actions
        found = next((x for x in (name, *spellings) if x in known), name)
        return f"{found}{equals}{value}"

    def meant(self, unknown: Sequence[str]) -> str:
        """Returns the option that the first unknown one is close to, if any."""
        options = [x.partition("=")[0] for x in unknown if x.startswith("--")]
        wanted = dashed(options[0]) if options else ""
        known = [dashed(x) for x in self._option_string_actions]
        near = [x for x in known if wanted.strip("-") and x.startswith(wanted)]
        near += difflib.get_close_matches(wanted, known, n=1)
        return f". Did you mean {near[0]}?" if near else ""

    def takes_value(self, argument: str) -> bool:
        """Returns whether the argument is an option whose value comes next."""
        action = self._option_string_actions.get(self.spelled(argument))
        return action is not None and action.nargs != 0

    def missing(self, options: "Options") -> str:
        """Returns what is required and was not given; empty if all is."""
        lines = [
            text
            for name, text in self._required.items()
            if getattr(options, name) is None
        ]
        return "\n  ".join(["missing:", *lines]) if lines else ""


class _Several(argparse.Action):
    """Takes `--models a b` and `--models=a --models=b`, not the default."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest)
        before = [] if before is self.default else before
        setattr(namespace, self.dest, [*before, *values])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A program: its options, what it runs, and what `--help` says."""

    # As it is called, such as `tfdistill run`.
    name: str
    about: str
    # Adds its options.
    define: Callable[[Flags], None]
    # Returns the exit code, which is 2 after a `UsageError`, and without the
    # extra that it needs.
    run: Callable[[Options], int]
    # Arguments after the name, a line for each form.
    usage: str = "[options]"
    # The end of `--help`, printed as it is.
    notes: str = ""
    # Whether a script, or what follows the first `--`, is a command: it becomes
    # the option `command`.
    takes_command: bool = False
    # The meaning of a .py file among the options. It becomes the option
    # `file`, and what follows the first `--` its arguments, `command`.
    takes_file: str = ""

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
            return self._run(options)

        app.run(run, flags_parser=parse)
        raise SystemExit(0)

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Runs the program inside this process and returns its exit code.

        Args:
            argv: Arguments without the program's name. Default
                `sys.argv[1:]`.
        """
        return self._run(self.parse(sys.argv[1:] if argv is None else argv))

    def _run(self, options: Options) -> int:
        try:
            with extras.needed_by(self.name):
                return self.run(options)
        except extras.MissingError as error:
            print(error, file=sys.stderr)
            return EXIT_OPTIONS
        except UsageError as error:
            self.parser().error(str(error))

    def help(self) -> str:
        """Returns the text of `--help`."""
        return self.parser().format_help()

    def parser(self) -> Flags:
        """Returns the parser of its options."""
        forms = self.usage.replace("\n", f"\n       {self.name} ")
        made = Flags(
            prog=self.name,
            usage=f"{self.name} {forms}".replace("%", "%%"),
            description=inspect.cleandoc(self.about),
            epilog=self.notes,
        )
        if self.takes_file:
            made.add_argument(
                "file", nargs="?", metavar="FILE.py", help=self.takes_file
            )
        self.define(made)
        if made.quick:
            made.add("quick", "faster and less exact", False)
        return made

    def parse(self, argv: Sequence[str]) -> Options:
        """Returns the options; exits with code 2 if an argument is wrong."""
        before: Sequence[str] = argv
        command: Sequence[str] = []
        parser = self.parser()
        if self.takes_command:
            before, command = _split(before, parser)
        elif self.takes_file and "--" in before:
            at = before.index("--")
            before, command = before[:at], before[at + 1 :]
        before = [parser.spelled(argument) for argument in before]
        if "--quick" in before:
            parser.set_defaults(**parser.quick)
        options, unknown = parser.parse_known_args(before)
        if unknown:
            hint = (
                ". Pass a script without `python`, or put a command after `--`"
            )
            hint = hint if self.takes_command else ""
            hint = parser.meant(unknown) or hint
            parser.error(f"unknown arguments: {' '.join(unknown)}{hint}")
        if missing := parser.missing(options):
            parser.error(missing)
        if self.takes_command or self.takes_file:
            options.command = list(command)
            options.program, options.given = self.name, list(argv)
        return options


@dataclasses.dataclass(frozen=True, kw_only=True)
class Commands:
    """A program whose first word chooses another one."""

    name: str
    about: str
    # What each program does, in the order of use.
    commands: Mapping[str, str]
    # Returns the program of a name.
    load: Callable[[str], "Program | Commands"]
    # The end of `--help`, printed as it is.
    notes: str = ""

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

    def help(self) -> str:
        """Returns the text of `--help`."""
        width = max(map(len, self.commands))
        rows = [f"  {n:<{width}}  {text}" for n, text in self.commands.items()]
        return "\n".join(
            [
                f"usage: {self.name} COMMAND [options]\n",
                f"{self.about}\n",
                *rows,
                f"\n{self.name} COMMAND --help lists a command's options.\n",
                self.notes,
            ]
        )

    def _chosen(self, argv: Sequence[str]) -> "Program | Commands":
        first = argv[0] if argv else "--help"
        if first in ("--help", "-h", "help"):
            print(self.help(), end="")
            raise SystemExit(0)
        if first in self.commands:
            name = f"{self.name} {first}"
            return dataclasses.replace(self.load(first), name=name)
        near = difflib.get_close_matches(first, self.commands, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        if first.endswith(".py") and "run" in self.commands:
            hint = f" Did you mean `{self.name} run {first}`?"
        print(self.help(), file=sys.stderr)
        print(
            f"{self.name}: the first argument must be a command; received "
            f"{first!r}.{hint}",
            file=sys.stderr,
        )
        raise SystemExit(EXIT_OPTIONS)


def _split(
    arguments: Sequence[str], parser: Flags
) -> tuple[Sequence[str], Sequence[str]]:
    """Splits a program's own arguments from the script or command it runs."""
    for at, argument in enumerate(arguments):
        if argument == "--":
            return arguments[:at], arguments[at + 1 :]
        is_script = argument.endswith(".py") and not argument.startswith("-")
        if is_script and not (at and parser.takes_value(arguments[at - 1])):
            return arguments[:at], [PYTHON, *arguments[at:]]
    return arguments, []


def dashed(name: str) -> str:
    """Returns an option's name as it is written on a command line."""
    return name.replace("_", "-")


def forget_output() -> None:
    """Drops what cannot be printed, now and at the interpreter's end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
