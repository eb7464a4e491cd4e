"""Turns a click log into rows of numbers, ready for an embedding.

A row is 40 little-endian 32-bit words: the label and 13 transformed integers
as float32 (NaN where missing), then 26 rows of embedding tables as int32.
"""

import pathlib
import sys
import time
from typing import Any

import numpy as np

from models import criteo_files
from models import criteo_options
from models import criteo_rows
from models import criteo_split
from models import criteo_writer

__all__ = ["convert", "records_of"]

_RECORD_WORDS = criteo_rows.NUM_COLUMNS
_FIRST_CATEGORY = criteo_rows.NUM_COLUMNS - criteo_rows.NUM_CATEGORIES
# Values of columns counted at once: about half a gigabyte with their order.
_COUNTED_VALUES = 1 << 26
_WINDOW_ROWS = 1 << 16


def convert(
    reader: criteo_files.Reader,
    options: criteo_options.Options,
    directory: pathlib.Path,
) -> dict[str, Any]:
    """Fills a directory: one pass over the text, two over numbers.

    Memory is bounded but for some bytes per row, most of them while rare
    categories are looked for.

    Args:
        reader: Reads the text.
        options: What the result depends on besides the text.
        directory: Empty.

    Returns:
        Rows of each split, rows read, and malformed lines by reason.

    Raises:
        ValueError: If the text or an option is at fault.
    """
    everything = directory / "everything.tmp"
    _write_everything(reader, everything)
    records = np.memmap(everything, "<i4", "r").reshape(-1, _RECORD_WORDS)
    kinds = criteo_split.assign(len(records), options=options)
    kept = _frequent(records, kinds, options.min_count)
    num_rows = _write_splits(records, kinds, kept, options, directory)
    del records
    everything.unlink()
    return {
        "num_rows": num_rows,
        "num_rows_read": reader.num_rows,
        "malformed": dict(reader.counts),
    }


def _write_everything(reader: criteo_files.Reader, path: pathlib.Path) -> None:
    """Writes all rows, still with fingerprints for categories."""
    total = sum(source.stat().st_size for source in reader.paths)
    progress = _Progress(total)
    with path.open("wb") as opened:
        for rows in reader.rows():
            records = records_of(rows, rows.fingerprints.view(np.int32))
            opened.write(records.tobytes())
            progress.tell(reader.num_bytes, reader.num_rows)


def records_of(rows: criteo_rows.Rows, categories: np.ndarray) -> np.ndarray:
    """Returns int32 `[rows, 40]`, as they stand in the files."""
    floats = np.empty((len(rows), _FIRST_CATEGORY), "<f4")
    floats[:, 0] = rows.labels
    floats[:, 1:] = criteo_rows.log_integers(rows)
    return np.concatenate([floats.view("<i4"), categories], axis=1)


class _Progress:
    """Tells of a long conversion on standard error, now and then."""

    def __init__(self, total: int, *, every_secs: float = 10.0) -> None:
        self._total = total
        self._every_secs = every_secs
        self._told = time.monotonic()

    def tell(self, num_bytes: int, num_rows: int) -> None:
        now = time.monotonic()
        if now - self._told < self._every_secs:
            return
        self._told = now
        print(
            f"Criteo: converting once: {num_rows} rows, "
            f"{num_bytes / self._total:.0%} of the files ...",
            file=sys.stderr,
            flush=True,
        )


def _frequent(
    records: np.ndarray, kinds: np.ndarray, min_count: int
) -> list[np.ndarray] | None:
    """Returns the kept fingerprints of each column; None: all of them."""
    if min_count == 1:
        return None
    train = np.flatnonzero(kinds == criteo_split.TRAIN)
    at_once = max(1, _COUNTED_VALUES // len(train))
    kept: list[np.ndarray] = []
    for first in range(_FIRST_CATEGORY, _RECORD_WORDS, at_once):
        columns = records[train, first : first + at_once].view(np.uint32)
        kept += [
            criteo_split.frequent(column, min_count=min_count)
            for column in columns.T
        ]
    return kept


def _write_splits(
    records: np.ndarray,
    kinds: np.ndarray,
    kept: list[np.ndarray] | None,
    options: criteo_options.Options,
    directory: pathlib.Path,
) -> dict[str, int]:
    sizes = np.array(options.field_sizes, np.uint32)
    writers = {
        criteo_split.TRAIN: criteo_writer.Writer(directory, "train"),
        criteo_split.VALIDATION: criteo_writer.Writer(directory, "validation"),
    }
    for first in range(0, len(records), _WINDOW_ROWS):
        window = np.array(records[first : first + _WINDOW_ROWS])
        fingerprints = window[:, _FIRST_CATEGORY:].view(np.uint32)
        hashed = criteo_rows.hashed_rows(fingerprints, sizes)
        for column, values in enumerate(kept or []):
            hashed[_rare(fingerprints[:, column], values), column] = (
                criteo_rows.RARE_ROW
            )
        window[:, _FIRST_CATEGORY:] = hashed
        for kind, writer in writers.items():
            writer.add(window[kinds[first : first + _WINDOW_ROWS] == kind])
    return {writer.split: writer.finish() for writer in writers.values()}


def _rare(fingerprints: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Whether each text is present but not kept."""
    if not len(kept):
        return fingerprints > 0
    places = np.searchsorted(kept, fingerprints).clip(max=len(kept) - 1)
    return (kept[places] != fingerprints) & (fingerprints > 0)
