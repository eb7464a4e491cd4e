"""Where the files of data sets lie, and in which order they are read."""

import collections
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

__all__ = ["Path", "Paths", "check_names", "data_dir", "natural_order"]


Path = str | os.PathLike[str]
Paths = Path | Sequence[Path]


def data_dir(given: Path | None = None) -> pathlib.Path:
    """Returns `given`, else TFDISTILL_DATA, else `../shared/data`."""
    if given is not None:
        return pathlib.Path(given)
    if os.environ.get("TFDISTILL_DATA"):
        return pathlib.Path(os.environ["TFDISTILL_DATA"])
    repository = pathlib.Path(__file__).resolve().parents[1]
    return repository.parent / "shared" / "data"


def natural_order(path: pathlib.Path) -> list[tuple[int, int, str]]:
    """Returns a key to sort by: day_9 comes before day_10."""
    parts = re.split(r"([0-9]+)", str(path))
    return [
        (1, int(part), "") if part.isdecimal() else (0, 0, part)
        for part in parts
    ]


def check_names(names: Sequence[Any]) -> None:
    """Checks the files that a user's `path` stands for."""
    if not names:
        raise ValueError("`path` must name at least one file; received none.")
    twice = [
        n for n, number in collections.Counter(names).items() if number > 1
    ]
    if twice:
        raise ValueError(
            f"`path` must name each file once; received {twice[0]} twice. "
            "Remove one of the two."
        )
