"""Which rows train and which validate, and which categories are frequent."""

import numpy as np

from models import criteo_fields
from models import criteo_options

__all__ = ["TRAIN", "UNUSED", "VALIDATION", "assign", "frequent"]

TRAIN, VALIDATION, UNUSED = 0, 1, 2
# Draws for the split itself, and for the rows kept where fewer are wanted.
_SPLIT_DRAW, _TRAIN_DRAW, _VALIDATION_DRAW = 1, 2, 3


def assign(num_rows: int, *, options: criteo_options.Options) -> np.ndarray:
    """Says of each row what it is for.

    Args:
        num_rows: Rows in all.
        options: Name the split, its share, seed and limits.

    Returns:
        `TRAIN`, `VALIDATION` or `UNUSED`, uint8 `[num_rows]`.

    Raises:
        ValueError: If a split would have no row, or fewer than its limit.
    """
    fraction, seed = options.validation_fraction, options.split_seed
    num_last = round(num_rows * fraction)
    if not 1 <= num_last < num_rows:
        raise ValueError(
            f"Both splits must have a row; received {num_rows} rows and "
            f"`validation_fraction`={fraction:.4g}. Use more rows, or another "
            "fraction."
        )
    validates = np.zeros(num_rows, bool)
    if options.split == "time":
        validates[-num_last:] = True
    else:
        draws = _draws(num_rows, seed, _SPLIT_DRAW)
        validates[np.argpartition(draws, num_last - 1)[:num_last]] = True
    kinds = np.where(validates, VALIDATION, TRAIN).astype(np.uint8)
    _keep(kinds, TRAIN, options.num_train, _draws(num_rows, seed, _TRAIN_DRAW))
    _keep(
        kinds,
        VALIDATION,
        options.num_validation,
        _draws(num_rows, seed, _VALIDATION_DRAW),
    )
    return kinds


def _draws(num_rows: int, seed: int, draw: int) -> np.ndarray:
    """A number for each row that depends on nothing but the arguments."""
    key = np.random.SeedSequence([seed, draw]).generate_state(1, np.uint64)
    return criteo_fields.mix(np.arange(num_rows, dtype=np.uint64) + key)


def _keep(
    kinds: np.ndarray, kind: int, number: int | None, draws: np.ndarray
) -> None:
    if number is None:
        return
    rows = np.flatnonzero(kinds == kind)
    name = "num_train" if kind == TRAIN else "num_validation"
    if not 1 <= number <= len(rows):
        raise ValueError(
            f"`{name}` must be from 1 to {len(rows)}; received {number}."
        )
    kinds[rows[np.argsort(draws[rows])[number:]]] = UNUSED


def frequent(fingerprints: np.ndarray, *, min_count: int) -> np.ndarray:
    """Returns the sorted fingerprints that come at least so many times.

    Args:
        fingerprints: Of one column in the training rows, uint32 `[rows]`.
        min_count: The least number of times.

    Returns:
        uint32 `[kept]`, without that of missing text.
    """
    values, counts = np.unique(fingerprints, return_counts=True)
    return values[(counts >= min_count) & (values > 0)]
