"""The checking of configuration fields: names, types and ranges."""

import dataclasses
import difflib
import json
import math
import types
import typing
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import ClassVar
from typing import Self

_DESCRIPTIONS = {
    bool: "true or false",
    float: "a finite number",
    int: "a whole number",
    str: "a string",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """Base of all parts of a configuration.

    A field's annotation decides what is accepted; JSON's lists become tuples
    and whole numbers become floats where those are asked for, so that writing
    and reading give back an equal value.
    """

    # What messages put before the name of a field, such as "model.".
    PREFIX: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Checks the type of every field."""
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

    @classmethod
    def from_tree(cls, tree: Any) -> Self:
        """Returns the section that a JSON object describes.

        Raises:
            ValueError: If a name is unknown or missing or a value is wrong.
        """
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

    def check_choice(self, name: str, choices: Sequence[str]) -> None:
        """Checks that a field has one of these values.

        Raises:
            ValueError: If not, with the nearest of them.
        """
        value = getattr(self, name)
        if value not in choices:
            near = difflib.get_close_matches(str(value), choices, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"`{self.PREFIX}{name}` must be one of {', '.join(choices)}; "
                f"received {value!r}.{hint}"
            )

    def check_range(
        self,
        name: str,
        *,
        least: float | None = None,
        above: float | None = None,
    ) -> None:
        """Checks that a number is >= `least` and > `above`, or None.

        Raises:
            ValueError: If not.
        """
        value = getattr(self, name)
        if value is None:
            return
        for bound, fits, sign in (
            (least, least is None or value >= least, ">="),
            (above, above is None or value > above, ">"),
        ):
            if not fits:
                raise ValueError(
                    f"`{self.PREFIX}{name}` must be {sign} {bound}; received "
                    f"{value}."
                )


def check_name(name: str, known: Sequence[str], *, prefix: str = "") -> None:
    """Checks that a field exists.

    Raises:
        ValueError: If not, with the nearest names.
    """
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
