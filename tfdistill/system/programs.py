"""A command-line program: options by absl.flags, its run by absl.app.

Each program parses into options of its own, never into absl's global FLAGS,
so that one process may hold many programs and call each of them many times.
"""

import dataclasses
import difflib
import enum
import faulthandler
import functools
import inspect
import itertools
import logging as python_logging
import math
import os
import re
import sys
import textwrap
import types
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NoReturn

from absl import app
from absl import flags
from absl import logging

EXIT_OPTIONS = 2
# The values of all options by name, and those of the words and the command.
Options = types.SimpleNamespace
# Raised by a running program when its options turn out to be wrong.
UsageError = app.UsageError
# absl's own flags, part of every program: --verbosity, --log_dir, --pdb, ...
_SHARED = {
    module: flags.FLAGS.get_flags_for_module(module)
    for module in ("absl.logging", "absl.app")
}
_WIDTH = 80
_COLUMN = 27
_STANDARD = {
    "-h, --help": "print this and exit",
    "--helpfull": "print the options for logging and debugging as well",
    "--flagfile=FILE": "read options from a file, one on each line",
}
# How absl ends the help of an option that may be repeated.
_REPEATED = "repeat this option to specify a list of values"


_DEFINE: Mapping[type, Callable[..., Any]] = {
    bool: flags.DEFINE_boolean,
    enum.Enum: flags.DEFINE_enum,
    float: flags.DEFINE_float,
    int: flags.DEFINE_integer,
    str: flags.DEFINE_string,
}
_DEFINE_MULTI: Mapping[type, Callable[..., Any]] = {
    enum.Enum: flags.DEFINE_multi_enum,
    int: flags.DEFINE_multi_integer,
    str: flags.DEFINE_multi_string,
}


class Flags:
    """The options of one program while they are defined."""

    def __init__(self) -> None:
        self.values = flags.FlagValues()
        self.sections: dict[str, list[str]] = {}
        self.required: set[str] = set()
        self.quick: dict[str, Any] = {}
        self._section = "options"

    def section(self, title: str) -> None:
        """Puts what is added from now on under a heading of `--help`."""
        self._section = title

    def add(
        self,
        name: str,
        text: str,
        default: Any = None,
        *,
        kind: type | None = None,
        quick: Any = None,
        **more: Any,
    ) -> None:
        """Adds an option; `more` is what absl's `flags.DEFINE_...` take.

        A program with a `quick` value for some options has the option
        `--quick`, by which these take that value unless they are given.

        Its kind is that of its default, text without one; a list is of an
        option that may be repeated. A text that begins with `<DIR>: ` gives
        the value a name, as absl's own texts of enums do.
        """
        many = isinstance(default, list)
        first = (default or [""])[0] if many else default
        if "enum_values" in more:
            kind = enum.Enum
        elif kind is None:
            kind = str if first is None else type(first)
        define = (_DEFINE_MULTI if many else _DEFINE)[kind]
        define(
            name=name,
            default=default,
            help=text,
            flag_values=self.values,
            **more,
        )
        self.sections.setdefault(self._section, []).append(name)
        if quick is not None:
            self.quick[name] = quick
        if more.get("required"):
            self.required.add(name)

    def check(
        self, name: str, holds: Callable[[Any], bool], message: str
    ) -> None:
        """Refuses the values of an option for which `holds` is false."""
        flags.register_validator(name, holds, message, flag_values=self.values)

    def check_positive(self, name: str) -> None:
        """Refuses what is not finite and above zero."""

        def holds(value: float) -> bool:
            return math.isfinite(value) and value > 0

        self.check(name, holds, f"--{name} must be > 0 and finite")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A program: its options, what it runs, and what `--help` says.

    Attributes:
        name: As it is called, such as `python -m launch.local`.
        about: What it does.
        define: Adds its options.
        run: Runs it with its options and returns the exit code. A
            `UsageError` ends the program with code 2.
        usage: What may follow the name, a line for each form.
        notes: The end of `--help`, printed as it is.
        words: Names of the arguments without dashes, which all must be given.
        takes_command: Whether what follows the first `--` is a command, which
            becomes the option `command`.
    """

    name: str
    about: str
    define: Callable[[Flags], None]
    run: Callable[[Options], int]
    usage: str = "[options]"
    notes: str = ""
    words: tuple[str, ...] = ()
    takes_command: bool = False

    def start(self) -> NoReturn:
        """Runs the program with the arguments of this process, and exits."""
        was_on = faulthandler.is_enabled()
        shared = flags.FLAGS

        def parse(argv: Sequence[str]) -> Options:
            options = self.parse(argv[1:])
            shared.mark_as_parsed()
            quiet.append(shared["verbosity"].using_default_value)
            return options

        def run(options: Options) -> int:
            if not was_on:
                # The stacks of all threads would push TensorFlow's last words
                # out of the end of a log, which is what launchers quote.
                faulthandler.disable()
            if quiet[0]:
                # Programs report their progress, libraries only what is wrong.
                logging.get_absl_logger().setLevel(python_logging.INFO)
                logging.get_absl_handler().addFilter(_is_ours_or_wrong)
                python_logging.getLogger().setLevel(python_logging.WARNING)
            return self._run(options)

        quiet: list[bool] = []
        app.run(run, flags_parser=parse)
        raise AssertionError("absl.app.run exits")

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Runs the program inside this process and returns its exit code.

        Args:
            argv: Arguments without the program's name. Default
                `sys.argv[1:]`.
        """
        return self._run(self.parse(sys.argv[1:] if argv is None else argv))

    def _run(self, options: Options) -> int:
        try:
            return self.run(options)
        except UsageError as error:
            self._refuse(str(error))

    def parse(self, argv: Sequence[str]) -> Options:
        """Returns the options; exits with code 2 if an argument is wrong."""
        before, command = list(argv), []
        if self.takes_command and "--" in before:
            index = before.index("--")
            before, command = before[:index], before[index + 1 :]
        defined = self.defined()
        values = defined.values
        if self.takes_command and len(before) == len(argv):
            self._check_no_command(before, values)
        try:
            _check_values_follow(before, values)
            given = values([self.name, *_repeated(before, values)])[1:]
        except flags.UnrecognizedFlagError as error:
            close = difflib.get_close_matches(error.flagname, list(values), 1)
            self._refuse(
                f"expected an option of this program; received "
                f"{error.flagvalue}"
                + "".join(f". Did you mean --{name}?" for name in close)
            )
        except (flags.Error, ValueError) as error:
            self._refuse(str(error))
        if len(given) != len(self.words):
            wanted = " ".join(map(str.upper, self.words)) or "only options"
            self._refuse(
                f"expected {wanted}; received {' '.join(given) or 'nothing'}"
            )
        if defined.quick and values["quick"].value:
            for name, value in defined.quick.items():
                if values[name].using_default_value:
                    values[name].value = value
        options = Options(**dict(zip(self.words, given, strict=True)))
        for name in itertools.chain.from_iterable(defined.sections.values()):
            setattr(options, name, values[name].value)
        if self.takes_command:
            options.command = command
        return options

    def _check_no_command(
        self, argv: Sequence[str], values: flags.FlagValues
    ) -> None:
        """Refuses a command that no `--` has set apart from the options."""
        is_value = is_list = False
        for number, given in enumerate(argv):
            if given.startswith("-"):
                name = given.removeprefix("--")
                flag = values[name] if name in values else None
                is_value = flag is not None and not flag.boolean
                is_list = isinstance(flag, flags.MultiFlag)
            elif not is_value:
                self._refuse(
                    "expected -- before the command: "
                    f"{' '.join([*argv[:number], '--', *argv[number:]])}"
                )
            else:
                is_value = is_list

    def defined(self) -> Flags:
        """Returns the options as they are before any argument is read."""
        made = Flags()
        self.define(made)
        if made.quick:
            shown = (
                f"{name}={','.join(map(str, value))}"
                if isinstance(value, list)
                else f"{name}={value}"
                for name, value in made.quick.items()
            )
            made.add("quick", f"rough and soon: {' '.join(shown)}", False)
        for name, full in (("help", False), ("helpfull", True)):
            text = functools.partial(self.help, full)
            made.values[name] = _HelpFlag(name, text)
        for flag in itertools.chain.from_iterable(_SHARED.values()):
            made.values[flag.name] = flag
        return made

    def help(self, full: bool = False) -> str:
        """Returns what `--help`, or `--helpfull`, prints."""
        defined = self.defined()
        paragraphs = inspect.cleandoc(self.about).split("\n\n")
        parts = [self._usage()]
        parts += [textwrap.fill(text, _WIDTH) for text in paragraphs]
        for title, names in defined.sections.items():
            lines = [
                _described(defined.values[name], name in defined.required)
                for name in names
            ]
            parts.append("\n".join([f"{title}:", *lines]))
        lines = [_item(*item) for item in _STANDARD.items()]
        parts.append("\n".join(["help and files:", *lines]))
        for module, shared in _SHARED.items() if full else ():
            lines = [_described(flag) for flag in shared]
            parts.append("\n".join([f"{module}:", *lines]))
        if self.notes:
            parts.append(self.notes.rstrip("\n"))
        return "\n\n".join(parts) + "\n"

    def _usage(self) -> str:
        lines = [
            line
            for form in self.usage.splitlines()
            for line in textwrap.wrap(
                f"{self.name} {form}",
                _WIDTH - len("usage: "),
                subsequent_indent="    ",
                break_on_hyphens=False,
            )
        ]
        return "usage: " + "\n       ".join(lines)

    def _refuse(self, message: str) -> NoReturn:
        text = message.replace("\n", "\n  ")
        print(f"{self._usage()}\n{self.name}: error: {text}", file=sys.stderr)
        raise SystemExit(EXIT_OPTIONS)


def forget_output() -> None:
    """Drops what cannot be printed, now and at the interpreter's end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_ours_or_wrong(record: python_logging.LogRecord) -> bool:
    """TensorFlow and Keras write each file they save to absl's log, too."""
    theirs = "/tensorflow/" in record.pathname or "/keras/" in record.pathname
    return record.levelno > python_logging.INFO or not theirs


class _HelpFlag(flags.BooleanFlag):
    """Prints a text and exits as soon as it is read, as absl's own does.

    absl's prints the global FLAGS, and exits with 1.
    """

    def __init__(self, name: str, text: Callable[[], str]) -> None:
        short = "h" if name == "help" else None
        super().__init__(name, False, "print help", short_name=short)
        self._text = text

    def parse(self, argument: Any) -> None:
        if self._parse(argument):
            print(self._text(), end="", flush=True)
            raise SystemExit(0)


def _check_values_follow(argv: Sequence[str], values: flags.FlagValues) -> None:
    """By itself absl takes `--num_groups=2` for the value of `--workdir`."""
    for given, following in itertools.pairwise(argv):
        name = given.removeprefix("--")
        takes_value = name in values and not values[name].boolean
        if takes_value and name != given and following.startswith("--"):
            raise ValueError(
                f"expected a value after {given}; received {following}"
            )


def _repeated(argv: Sequence[str], values: flags.FlagValues) -> list[str]:
    """Writes `--models a b` as absl reads it: `--models=a --models=b`."""
    found: list[str] = []
    repeated: str | None = None
    for given in argv:
        name = given.removeprefix("--")
        if given.startswith("-"):
            is_name = name in values and name != given
            many = is_name and isinstance(values[name], flags.MultiFlag)
            repeated = given if many else None
            found.append(given)
        elif repeated is None:
            found.append(given)
        elif found[-1] == repeated:
            found[-1] = f"{repeated}={given}"
        else:
            found.append(f"{repeated}={given}")
    return found


def _described(flag: flags.Flag[Any], required: bool = False) -> str:
    """Returns the lines of `--help` for one option."""
    text = " ".join(flag.help.split()).replace(_REPEATED, "may be repeated")
    match = re.match(r"<(\S+)>: (.*)", text)
    value, text = match.groups() if match else (_value_name(flag), text)
    notes = ["required"] if required else []
    if len(value) > _COLUMN:
        notes.append(f"one of {value.replace('|', ', ')}")
        value = "NAME"
    shown = _default(flag.default)
    if shown and "default" not in text:
        notes.append(f"default {shown}")
    if notes:
        text += f" ({'; '.join(notes)})"
    return _item(f"--{flag.name}" + (f"={value}" if value else ""), text)


def _default(value: Any) -> str:
    if value is None or value is False:
        return ""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _value_name(flag: flags.Flag[Any]) -> str:
    if flag.boolean:
        return ""
    if flag.name.endswith("_secs"):
        return "SECS"
    kind = flag.flag_type().rpartition(" ")[2]
    return {"int": "N", "float": "X"}.get(kind, "TEXT")


def _item(head: str, text: str, column: int = _COLUMN) -> str:
    indent = " " * column
    text = textwrap.fill(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
    if len(head) > column - 4:
        return f"  {head}\n{text}"
    return f"  {head}".ljust(column) + text.removeprefix(indent)


def listing(title: str, items: Mapping[str, str]) -> str:
    """Returns names and what they are, for the notes of a program."""
    column = max(map(len, items)) + 4
    lines = [_item(name, text, column) for name, text in items.items()]
    return "\n".join([f"{title}:", *lines])
