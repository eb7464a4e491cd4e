"""Command-line options declared as dataclass fields.

A launcher's dataclass declares each field's meaning, default and limits. The
options of the command line, and the checks of what Python code passes, are made
from these.
"""

import dataclasses
import types
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

from tfdistill.system import programs

# What an option is, for people.
_KINDS: dict[Any, str] = {
    int: "a whole number",
    int | float: "a number",
    str: "a string",
    str | None: "a string or None",
}


def option(
    text: str,
    default: object = dataclasses.MISSING,
    *,
    section: str = "",
    least: float | None = None,
    kind: Callable[[str], Any] | None = None,
    choices: Sequence[str] | None = None,
) -> Any:
    """Returns a field that is also an option; one without default is required.

    Args:
        text: As of `programs.Program.add`.
        default: A tuple is for an option that may be repeated.
        section: A new heading of `--help`, for this field and those after it.
        least: The smallest number that it may be.
        kind: What reads it; default: the type of the default.
        choices: What it may be.
    """
    told = dict(
        text=text, section=section, least=least, kind=kind, choices=choices
    )
    return dataclasses.field(default=default, metadata=told)


def _options(
    of: Any, without: Sequence[str] = ()
) -> list[dataclasses.Field[Any]]:
    fields = dataclasses.fields(of)
    return [x for x in fields if x.metadata and x.name not in without]


def add(
    options: programs.Program, of: type, *, without: Sequence[str] = ()
) -> None:
    """Adds the options of a dataclass to a program's, without some."""
    for field in _options(of, without):
        told = field.metadata
        if told["section"]:
            options.section(told["section"])
        required = field.default is dataclasses.MISSING
        default = None if required else field.default
        options.add(
            field.name,
            told["text"],
            list(default) if isinstance(default, tuple) else default,
            kind=told["kind"],
            enum_values=told["choices"],
            required=required,
        )


def chosen(
    of: type, options: object, *, without: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns the fields of a dataclass as parsed options have them."""
    return {
        field.name: getattr(options, field.name)
        for field in _options(of, without)
    }


def check(made: object) -> None:
    """Checks the fields of a dataclass; a ValueError names the wrong one."""
    for field in _options(made):
        value = getattr(made, field.name)
        least, choices = field.metadata["least"], field.metadata["choices"]
        kind: Any = int | float if field.type is float else field.type
        must = ""
        if choices and value not in choices:
            must = f"one of {tuple(choices)}"
        elif isinstance(kind, type | types.UnionType) and (
            not isinstance(value, kind)
            or (isinstance(value, bool) and kind is not bool)
        ):
            must = _KINDS.get(kind, str(kind))
        elif least is not None and not (value is None is field.default):
            must = "" if value >= least else f">= {least}"
        if must:
            raise ValueError(
                f"`{field.name}` must be {must}; received {value!r}."
            )
