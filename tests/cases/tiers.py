"""Cases of a table that are for the deep tier."""

from collections.abc import Collection
from collections.abc import Iterable
from typing import Any

import pytest


def deep(*values: Any, **named: Any) -> Any:
    """A case like one of the default tier."""
    return pytest.param(*values, marks=pytest.mark.deep, **named)


def but_for(every_run: Collection[str], names: Iterable[str]) -> list[Any]:
    """Names of which some are tried in every run; the others are deep."""
    return [name if name in every_run else deep(name) for name in names]
