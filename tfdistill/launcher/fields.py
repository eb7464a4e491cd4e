"""Options that are told once, as the fields of a dataclass.

A launcher's dataclass says of each field what it means, its default and its
limits. From that come the options of the command line, the checks of what
Python code passes, and the arguments with which one program starts another.
"""

import dataclasses
import inspect
import numbers
import typing
from collections.abc import Sequence
from typing import Any

from tfdistill.system import programs


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Option:
    text: str
    section: str
    least: float | None
    kind: Any
    choices: Sequence[str] | None


def option(
    text: str,
    default: Any = dataclasses.MISSING,
    *,
    section: str = "",
    least: float | None = None,
    kind: Any = None,
    choices: Sequence[str] | None = None,
) -> Any:
    """Returns a field that is also an option; one without default is required.

    Args:
        text: As of `programs.Flags.add`.
        default: A tuple is for an option that may be repeated.
        section: A new heading of `--help`, for this field and those after it.
        least: The smallest number that it may be.
        kind: What reads it; default: the type of the default.
        choices: What it may be.
    """
    told = _Option(
        text=text, section=section, least=least, kind=kind, choices=choices
    )
    return dataclasses.field(default=default, metadata={"option": told})


def _options(of: Any) -> list[tuple[dataclasses.Field[Any], _Option]]:
    found = dataclasses.fields(of)
    return [(f, f.metadata["option"]) for f in found if "option" in f.metadata]


def add(options: programs.Flags, of: type) -> None:
    """Adds the options of a dataclass to a program's."""
    for field, told in _options(of):
        if told.section:
            options.section(told.section)
        required = field.default is dataclasses.MISSING
        default = None if required else field.default
        options.add(
            field.name,
            inspect.cleandoc(told.text).replace("\n", " "),
            list(default) if isinstance(default, tuple) else default,
            kind=told.kind,
            enum_values=told.choices,
            required=required,
        )


def chosen(of: Any, options: object) -> dict[str, Any]:
    """Returns the fields of a dataclass as parsed options have them."""
    names = [field.name for field, _ in _options(of)]
    return {name: getattr(options, name) for name in names}


def arguments(of: Any, options: object) -> list[str]:
    """Returns them as arguments for a program with these options."""
    found = []
    for name, value in chosen(of, options).items():
        several = value if isinstance(value, list | tuple) else [value]
        found += [f"--{name}={one}" for one in several if one is not None]
    return found


# What may be passed for a type, and what an error calls it.
_TYPES = {
    int: (numbers.Integral, "an int"),
    float: (numbers.Real, "a float"),
    str: (str, "a str"),
}


def _check_type(field: dataclasses.Field[Any], value: Any) -> None:
    """Checks a value against the annotation: T, T | None or Sequence[T]."""
    kind, *_ = typing.get_args(field.type) or (field.type,)
    accepted, text = _TYPES[kind]
    several = typing.get_origin(field.type) is Sequence
    if several:
        text = f"a list, each element {text}"
    each = value if several else [value]
    if not isinstance(each, list | tuple) or any(
        isinstance(one, bool) or not isinstance(one, accepted) for one in each
    ):
        raise ValueError(f"`{field.name}` must be {text}; received {value!r}.")


def check(made: Any) -> None:
    """Checks the fields of a dataclass; a ValueError names the wrong one."""
    for field, told in _options(made):
        value = getattr(made, field.name)
        if value is None and field.default is None:
            continue
        _check_type(field, value)
        if told.least is not None and not value >= told.least:
            raise ValueError(
                f"`{field.name}` must be >= {told.least}; received {value}."
            )
        if told.choices and value not in told.choices:
            raise ValueError(
                f"`{field.name}` must be one of {tuple(told.choices)}; "
                f"received {value!r}."
            )
