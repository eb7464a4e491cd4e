"""The checking of configuration fields: names, types and ranges."""

import dataclasses
import difflib
import inspect
import json
import math
import operator
import types
import typing
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import ClassVar
from typing import Self

# Of a field's metadata.
_RANGE = "range"
FIRST_DEFAULT = "first_default"
_DESCRIPTIONS = {
    bool: "true or false",
    float: "a finite number",
    int: "a whole number",
    str: "a string",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Range:
    """The values that a field may have, if it is not null."""

    least: float | None
    above: float | None
    below: float | None
    choices: Sequence[str] | None

    def check(self, name: str, value: Any) -> None:
        if isinstance(value, str) and self.choices is not None:
            has_range = (self.least, self.above, self.below) != (None,) * 3
            _check_choice(name, value, self.choices, or_number=has_range)
        if value is None or isinstance(value, str | tuple | bool):
            return
        for sign, bound, fits in (
            (">=", self.least, operator.ge),
            (">", self.above, operator.gt),
            ("<", self.below, operator.lt),
        ):
            if bound is not None and not fits(value, bound):
                raise ValueError(
                    f"`{name}` must be {sign} {bound}; received {value}."
                )


def option(
    default: Any = dataclasses.MISSING,
    *,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: Sequence[str] | None = None,
    first_default: Any = dataclasses.MISSING,
) -> Any:
    """Returns the field of a section, with its default and its range.

    A range is of numbers, and `choices` of strings; null, true and false are
    in each. Where the
    default has changed, `first_default` is the one of the first release.
    """
    found = _Range(least=least, above=above, below=below, choices=choices)
    metadata: dict[str, Any] = {_RANGE: found}
    if first_default is not dataclasses.MISSING:
        metadata[FIRST_DEFAULT] = first_default
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """Base of all parts of a configuration.

    A field's annotation decides what is accepted; JSON's lists become tuples
    and whole numbers become floats if those are expected, so that writing
    and reading give back an equal value.
    """

    # What messages put before the name of a field, such as "model.".
    PREFIX: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Checks the type and the range of every field."""
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            name = self.PREFIX + field.name
            value = _converted(getattr(self, field.name), hints[field.name])
            if value is _WRONG:
                raise ValueError(
                    f"`{name}` must be {_describe(hints[field.name])}; "
                    f"received {getattr(self, field.name)!r}."
                )
            object.__setattr__(self, field.name, value)
            if _RANGE in field.metadata:
                field.metadata[_RANGE].check(name, value)

    def taken_by(
        self, function: Callable[..., Any], *, but: Collection[str] = ()
    ) -> dict[str, Any]:
        """Returns the fields that a callable takes under the same names.

        All `but` those that only happen to be called alike.
        """
        taken = inspect.signature(function).parameters.keys() - set(but)
        names = (field.name for field in dataclasses.fields(self))
        return {name: getattr(self, name) for name in names if name in taken}

    @classmethod
    def from_tree(cls, tree: Any) -> Self:
        """Returns the section that a JSON object describes."""
        if not isinstance(tree, Mapping):
            where = f"`{cls.PREFIX.rstrip('.')}`" if cls.PREFIX else "It"
            raise ValueError(
                f"{where} must be a JSON object; received {tree!r}."
            )
        known = {field.name: field for field in dataclasses.fields(cls)}
        for name in tree:
            check_name(name, tuple(known), prefix=cls.PREFIX)
        for name, field in known.items():
            default = (field.default, field.default_factory)
            optional = default != (dataclasses.MISSING, dataclasses.MISSING)
            if name not in tree and not optional:
                raise ValueError(f"`{cls.PREFIX}{name}` is missing.")
        hints = typing.get_type_hints(cls)
        values = {
            name: hints[name].from_tree(value)
            if _is_section(hints[name])
            else value
            for name, value in tree.items()
        }
        return cls(**values)


def _check_choice(
    name: str, value: str, choices: Sequence[str], *, or_number: bool
) -> None:
    if value not in choices:
        near = difflib.get_close_matches(value, choices, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"`{name}` must be {'a number or ' if or_number else ''}one of "
            f"{', '.join(choices)}; received "
            f"{value!r}.{hint}"
        )


def check_name(name: str, known: Sequence[str], *, prefix: str = "") -> None:
    """Checks that a field exists; if not, names the nearest ones."""
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(
        f"`{prefix}{name}` is not a field of the configuration. {hint}"
        f"Fields{' of ' + prefix.rstrip('.') if prefix else ''}: "
        f"{', '.join(known)}."
    )


_WRONG = object()


def _is_section(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Section)


def _converted(value: Any, hint: Any) -> Any:
    """Returns the value as the annotation wants it, or `_WRONG`."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        found = (_converted(value, part) for part in typing.get_args(hint))
        return next((one for one in found if one is not _WRONG), _WRONG)
    if origin is tuple:
        return _tuple(value, typing.get_args(hint)[0])
    if origin is not None:  # Mapping[str, Any], the only other one in use.
        return _plain_object(value)
    if hint is float and type(value) in (int, float):
        return float(value) if math.isfinite(value) else _WRONG
    # Not isinstance: True is an int.
    return value if type(value) is hint else _WRONG


def _tuple(value: Any, hint: Any) -> Any:
    if isinstance(value, str) or not isinstance(value, Sequence):
        return _WRONG
    found = tuple(_converted(one, hint) for one in value)
    return _WRONG if any(one is _WRONG for one in found) else found


def _plain_object(value: Any) -> Any:
    """Returns a copy with nothing in it but what JSON has."""
    if not isinstance(value, Mapping):
        return _WRONG
    try:
        copy = json.loads(json.dumps(dict(value), allow_nan=False))
    except (TypeError, ValueError):
        return _WRONG
    # Keys that were not strings have become some.
    return copy if set(copy) == set(value) else _WRONG


def _describe(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(part) for part in typing.get_args(hint))
    if origin is tuple:
        return f"a list (of each entry: {_describe(typing.get_args(hint)[0])})"
    if origin is not None:
        return "a JSON object"
    if hint is type(None):
        return "null"
    return _DESCRIPTIONS.get(hint, getattr(hint, "__name__", str(hint)))
