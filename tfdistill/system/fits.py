"""Which `fit` of this process uses a place on disk: the first, or a later one.

A script may call `fit` several times, on one model or on many, with callbacks
that name one place. Files of the second `fit` must not be mistaken for files of
the first. A process that is started again runs its script again: its second
`fit` finds what the second `fit` left before.
"""

import contextlib
import contextvars
import dataclasses
import os
import re
import weakref
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

from tfdistill.system import run_files

_NAME = re.compile(r"fit_([2-9]|[1-9][0-9]{1,5})")


@dataclasses.dataclass(eq=False)
class _Fit:
    """A `fit` in progress: its numbers by place, and whether it made a step."""

    model: Any
    numbers: dict[str, int] = dataclasses.field(default_factory=dict)
    has_begun: bool = False


# By place, how many there were.
_ended: dict[str, int] = {}
_present: contextvars.ContextVar[_Fit | None] = contextvars.ContextVar(
    "present", default=None
)
# By model and place, the number of one that failed: it may be tried again.
_failed: weakref.WeakKeyDictionary[Any, dict[str, int]] = (
    weakref.WeakKeyDictionary()
)
_under_way: list[_Fit] = []
# Models trained here; and for an optimizer and a place, its number there.
_trained: weakref.WeakSet[Any] = weakref.WeakSet()
_known: weakref.WeakKeyDictionary[Any, dict[str, int]] = (
    weakref.WeakKeyDictionary()
)


@contextlib.contextmanager
def one(model: object) -> Iterator[None]:
    """Counts a `fit` of a model, at the places where it asked for a number.

    After a `fit` that fails, the next `fit` of the same model is a retry with
    the same number; a `fit` of another model gets the next number. A `fit` that
    was interrupted, or made no step, is not counted: the next `fit`, of any
    model, gets its number.
    """
    present = _Fit(model)
    token = _present.set(present)
    _under_way.append(present)
    try:
        yield
        _failed.pop(model, None)
        _trained.add(model)
        _count(present)
    except Exception:
        if present.has_begun:
            _failed.setdefault(model, {}).update(present.numbers)
            _count(present)
        raise
    finally:
        _under_way.remove(present)
        _present.reset(token)


def _count(fit: _Fit) -> None:
    for place, found in fit.numbers.items():
        _ended[place] = max(found, _ended.get(place, 0))


def note_step() -> None:
    """Notes that the present `fit` has made a step."""
    if present := _present.get():
        present.has_begun = True


def number(place: str | os.PathLike[str], *, of: object = None) -> int:
    """Returns which `fit` the present one is that uses a place: 1, 2 and so on.

    With `of`, the model's optimizer, all `fit`s of one training count once: a
    training keeps its optimizer, and a new optimizer begins another training.
    """
    key = run_files.real(place)
    known = {} if of is None else _known.setdefault(of, {})
    present = _present.get()
    found = _ended.get(key, 0) + 1
    if present is not None:
        found = _failed.get(present.model, {}).get(key, found)
    found = known.setdefault(key, found)
    if present is not None:
        present.numbers[key] = found
    return found


def is_under_way() -> bool:
    """Whether a `fit` of this process is under way, in whatever thread."""
    return bool(_under_way)


def has_trained(model: object) -> bool:
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
