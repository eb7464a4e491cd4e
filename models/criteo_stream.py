"""Batches straight from the text of a click log, without a conversion.

For one pass over data, as to predict; training reads the converted form.
"""

from collections.abc import Iterator
from collections.abc import Sequence

import numpy as np

from models import criteo_files
from models import criteo_options
from models import criteo_rows

__all__ = ["Arrays", "batches"]

Arrays = tuple[dict[str, np.ndarray], np.ndarray]


def batches(
    reader: criteo_files.Reader,
    *,
    batch_size: int,
    field_sizes: int | Sequence[int] = criteo_options.DEFAULT_FIELD_SIZE,
    missing_value: float = 0.0,
) -> Iterator[Arrays]:
    """Yields the rows in order, as `criteo.make_datasets` gives them.

    No category is rare here: that takes a count of all rows.

    Args:
        reader: Reads the files.
        batch_size: Rows of every batch but the last, >= 1.
        field_sizes: As for `criteo.make_datasets`. Default 10,000.
        missing_value: Stands for missing integers. Default 0.

    Yields:
        (`{"integers": float32 [batch, 13], "categories": int32 [batch, 26]}`,
        labels float32 `[batch, 1]`).

    Raises:
        ValueError: If an argument is out of range, or as `Reader` does.
    """
    if batch_size < 1:
        raise ValueError(f"`batch_size` must be >= 1; received {batch_size}.")
    sizes = np.array(criteo_options.checked_field_sizes(field_sizes), np.uint32)
    rest: list[np.ndarray] = []
    for rows in reader.rows():
        integers = criteo_rows.log_integers(rows)
        integers[rows.missing] = missing_value
        categories = criteo_rows.hashed_rows(rows.fingerprints, sizes)
        labels = rows.labels.astype(np.float32)[:, np.newaxis]
        found = [integers, categories, labels]
        if rest:
            pairs = zip(rest, found, strict=True)
            found = [np.concatenate(pair) for pair in pairs]
        whole = len(found[0]) - len(found[0]) % batch_size
        for first in range(0, whole, batch_size):
            yield _batch([a[first : first + batch_size] for a in found])
        rest = [array[whole:] for array in found]
    if rest and len(rest[0]):
        yield _batch(rest)


def _batch(arrays: list[np.ndarray]) -> Arrays:
    integers, categories, labels = arrays
    return {"integers": integers, "categories": categories}, labels
