"""Which `fit` of this process uses a place on disk: the first, or a later one.

A script may call `fit` several times, on one model or on many, with callbacks
that name one place. What the second leaves there is not that of the first. A
process that is started again runs its script again: its second `fit` finds what
its second one left before.
"""

import contextlib
import contextvars
import os
import re
import weakref
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

from tfdistill.system import run_files

_NAME = re.compile(r"fit_([2-9]|[1-9][0-9]{1,5})")
# By place, how many have ended there; by place, that of the present `fit`.
_ended: dict[str, int] = {}
_present: contextvars.ContextVar[dict[str, int] | None] = (
    contextvars.ContextVar("present", default=None)
)
# What was trained here; and by an optimizer and a place, its number there.
_trained: weakref.WeakSet[Any] = weakref.WeakSet()
_known: weakref.WeakKeyDictionary[Any, dict[str, int]] = (
    weakref.WeakKeyDictionary()
)


@contextlib.contextmanager
def one(model: Any) -> Iterator[None]:
    """Counts a `fit` of a model, where it asked for a number, if it ends well.

    One that fails is not counted: the next is that one, tried again.
    """
    token = _present.set({})
    try:
        yield
        for place, found in (_present.get() or {}).items():
            _ended[place] = max(found, _ended.get(place, 0))
        _trained.add(model)
    finally:
        _present.reset(token)


def number(place: str | os.PathLike[str], *, of: Any = None) -> int:
    """Returns which `fit` the present one is that uses a place: 1, 2 and so on.

    With `of`, the model's optimizer, all `fit`s of one training count once: a
    training goes on with its optimizer, and begins with another one.
    """
    key = run_files.real(place)
    known = {} if of is None else _known.setdefault(of, {})
    found = known.setdefault(key, _ended.get(key, 0) + 1)
    present = _present.get()
    if present is not None:
        present[key] = found
    return found


def has_trained(model: Any) -> bool:
    """Whether a `fit` of this process has trained a model."""
    return model in _trained


def below(place: str, number: int) -> str:
    """Returns where in a place a `fit` has its own: the first has it all.

    Example:
        >>> below("backup", 1), below("backup", 2)
        ('backup', 'backup/fit_2')
    """
    return place if number == 1 else f"{place}/fit_{number}"


def is_name(name: str) -> bool:
    """Whether a later `fit` has a place of that name."""
    return _NAME.fullmatch(name) is not None


def newest(names: Iterable[str]) -> int:
    """Returns the last number by the names in a place.

    Example:
        >>> newest(["group_0", "fit_2", "fit_10"]), newest(["group_0"])
        (10, 1)
    """
    found = map(_NAME.fullmatch, names)
    return max((int(match[1]) for match in found if match), default=1)


def start_again() -> None:
    """Forgets all, as a process does that is started again; for tests."""
    _ended.clear()
    _trained.clear()
    _known.clear()
