"""What the fast form of a click log depends on, besides the text."""

import dataclasses
from collections.abc import Sequence

from models import criteo_files
from models import criteo_rows

__all__ = ["DEFAULT_FIELD_SIZE", "SPLITS", "Options", "checked_field_sizes"]

SPLITS = ("hash", "time")
# Rows of each table; enough for some hundred thousand rows of text.
DEFAULT_FIELD_SIZE = 10_000
_SMALLEST_FIELD = criteo_rows.FIRST_HASHED_ROW + 1
_LARGEST_FIELD = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How to convert a click log.

    Attributes:
        field_sizes: Rows of the embedding table of each of the 26 columns, or
            one number for all; at least 3. Row 0 is for missing, row 1 for
            rare categories.
        min_count: Categories that come fewer times in the training rows get
            row 1. Default 1: none does.
        split: `"hash"` (default): which rows validate is drawn; `"time"`: the
            last ones do, where rows are in the order of time.
        validation_fraction: Share of the rows that validate, in (0, 1).
            Default 1/6.
        split_seed: Of the draws, >= 0. Default 0.
        num_train: Keep only so many training rows, drawn from all of them.
            Default None: all.
        num_validation: Likewise of the validation rows.
        malformed: What becomes of a faulty line: `"skip"` (default) or
            `"refuse"`.

    Raises:
        ValueError: If one is out of range.
    """

    field_sizes: int | Sequence[int]
    min_count: int = 1
    split: str = "hash"
    validation_fraction: float = 1 / 6
    split_seed: int = 0
    num_train: int | None = None
    num_validation: int | None = None
    malformed: str = "skip"

    def __post_init__(self) -> None:
        sizes = checked_field_sizes(self.field_sizes)
        object.__setattr__(self, "field_sizes", sizes)
        _check_one_of("split", self.split, SPLITS)
        _check_one_of("malformed", self.malformed, criteo_files.POLICIES)
        _check_at_least("min_count", self.min_count, 1)
        _check_at_least("split_seed", self.split_seed, 0)
        for name in ("num_train", "num_validation"):
            if getattr(self, name) is not None:
                _check_at_least(name, getattr(self, name), 1)
        if not 0 < self.validation_fraction < 1:
            raise ValueError(
                "`validation_fraction` must be in (0, 1); received "
                f"{self.validation_fraction}."
            )


def _check_one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(
            f"`{name}` must be one of {known}; received {value!r}."
        )


def _check_at_least(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or value < least:
        raise ValueError(
            f"`{name}` must be a whole number >= {least}; received {value!r}."
        )


def checked_field_sizes(sizes: int | Sequence[int]) -> tuple[int, ...]:
    """Returns the size of each column's embedding table.

    Args:
        sizes: One number for all columns, or 26.

    Raises:
        ValueError: If there are not 26, or one is out of range.

    Example:
        >>> checked_field_sizes(1000)[:3]
        (1000, 1000, 1000)
    """
    number = criteo_rows.NUM_CATEGORIES
    if isinstance(sizes, int):
        sizes = [sizes] * number
    valid = len(sizes) == number and all(
        isinstance(size, int) and _SMALLEST_FIELD <= size <= _LARGEST_FIELD
        for size in sizes
    )
    if not valid:
        raise ValueError(
            f"`field_sizes` must be one whole number or {number}, from "
            f"{_SMALLEST_FIELD} to 2**31 - 1 (rows 0 and 1 are for missing and "
            f"rare categories); received {sizes}."
        )
    return tuple(sizes)
