"""The fast form of a click log: split, converted, written once, opened.

A row is 40 little-endian 32-bit words: the label and 13 transformed integers
as float32 (NaN if missing), then 26 rows of embedding tables as int32. A
split is a sequence of part files of equal length; header.json says the rest.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np

from models import files as data_files
from models.criteo import files
from models.criteo import rows as criteo_rows

# Files of 1.3 MB: large enough to be read at full speed, small enough for a
# shuffle that takes some of them from anywhere.
PART_ROWS = 8192
SPLITS = ("hash", "time")
# Rows of each table; enough for some hundred thousand rows of text.
DEFAULT_FIELD_SIZE = 10_000
_SMALLEST_FIELD = criteo_rows.FIRST_HASHED_ROW + 1
_LARGEST_FIELD = 2**31 - 1
# The split is the same in all runs, so that they can be compared.
_SPLIT_SEED = (0, 1)
# Values of columns counted at once: about half a gigabyte with their order.
_COUNTED_VALUES = 1 << 26
# Change it with anything that changes what is written.
_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How to convert a click log.

    Attributes:
        field_sizes: Rows of the embedding table of each of the 26 columns, or
            one number for all; at least 3. Row 0 is for missing, row 1 for
            rare categories. Default 10,000.
        min_count: Categories that come fewer times in the training rows get
            row 1. Default 1: none does.
        split: `"hash"` (default): which rows validate is drawn; `"time"`: the
            last ones do, if rows are in the order of time.
        validation_fraction: Share of the rows that validate, in (0, 1).
            Default 1/6.
    """

    field_sizes: int | Sequence[int] = DEFAULT_FIELD_SIZE
    min_count: int = 1
    split: str = "hash"
    validation_fraction: float = 1 / 6

    def __post_init__(self) -> None:
        sizes = checked_field_sizes(self.field_sizes)
        object.__setattr__(self, "field_sizes", sizes)
        if self.split not in SPLITS:
            raise ValueError(
                f"`split` must be one of {SPLITS}; received {self.split!r}."
            )
        data_files.check_at_least("min_count", self.min_count, 1)
        if not 0 < self.validation_fraction < 1:
            raise ValueError(
                "`validation_fraction` must be in (0, 1); received "
                f"{self.validation_fraction}."
            )


def checked_field_sizes(sizes: int | Sequence[int]) -> tuple[int, ...]:
    """Returns the size of each column's embedding table.

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


def validates(num_rows: int, *, options: Options) -> np.ndarray:
    """Returns for each row whether it validates, bool `[num_rows]`."""
    fraction = options.validation_fraction
    number = round(num_rows * fraction)
    if not 1 <= number < num_rows:
        raise ValueError(
            f"Both splits must have a row; received {num_rows} rows and "
            f"`validation_fraction`={fraction:.4g}. Use more rows, or another "
            "fraction."
        )
    found = np.zeros(num_rows, bool)
    if options.split == "time":
        found[-number:] = True
    else:
        key = np.random.SeedSequence(_SPLIT_SEED).generate_state(1, np.uint64)
        draws = criteo_rows.mix(np.arange(num_rows, dtype=np.uint64) + key)
        found[np.argpartition(draws, number - 1)[:number]] = True
    return found


def convert(
    sources: Sequence[Any], options: Options, directory: pathlib.Path
) -> dict[str, Any]:
    """Fills a directory: one pass over the text, two over numbers.

    Memory is bounded except for some bytes per row, most of them while rare
    categories are looked for.

    Returns the rows of each split.
    """
    everything = directory / "everything.tmp"
    progress, num_rows = data_files.Progress(), 0
    with everything.open("wb") as opened:
        for source in sources:
            for batch in source.batches():
                # Still with fingerprints for categories.
                opened.write(criteo_rows.records(batch).tobytes())
                num_rows += len(batch)
                progress.report(
                    f"Criteo: converting {source.name}: {num_rows} rows so far"
                )
    records = np.memmap(everything, "<i4", "r").reshape(
        -1, criteo_rows.NUM_COLUMNS
    )
    held_out = validates(len(records), options=options)
    train, validation = np.flatnonzero(~held_out), np.flatnonzero(held_out)
    kept = _frequent(records, train, options.min_count)
    sizes = np.array(options.field_sizes, np.uint32)
    found = {"train": train, "validation": validation}
    for split, numbers in found.items():
        for part, first in enumerate(range(0, len(numbers), PART_ROWS)):
            window = records[numbers[first : first + PART_ROWS]]
            _hash(window, sizes, kept)
            (directory / _part_name(split, part)).write_bytes(window.tobytes())
    del records
    everything.unlink()
    return {
        "num_rows": {split: len(numbers) for split, numbers in found.items()}
    }


def _frequent(
    records: np.ndarray, train: np.ndarray, min_count: int
) -> list[np.ndarray]:
    """Returns the kept fingerprints of each column, sorted; [] keeps all."""
    if min_count == 1:
        return []
    at_once = max(1, _COUNTED_VALUES // len(train))
    kept: list[np.ndarray] = []
    for first in range(
        criteo_rows.FIRST_CATEGORY, criteo_rows.NUM_COLUMNS, at_once
    ):
        columns = records[train, first : first + at_once].view(np.uint32)
        for column in columns.T:
            values, counts = np.unique(column, return_counts=True)
            kept.append(values[(counts >= min_count) & (values > 0)])
    return kept


def _hash(
    records: np.ndarray, sizes: np.ndarray, kept: Sequence[np.ndarray]
) -> None:
    """Puts rows of tables in the place of fingerprints."""
    fingerprints = records[:, criteo_rows.FIRST_CATEGORY :].view(np.uint32)
    hashed = criteo_rows.hashed_rows(fingerprints, sizes)
    for column, values in enumerate(kept):
        found = fingerprints[:, column]
        rare = found > 0
        if len(values):
            nearest = np.searchsorted(values, found).clip(max=len(values) - 1)
            rare &= values[nearest] != found
        hashed[rare, column] = criteo_rows.RARE_ROW
    records[:, criteo_rows.FIRST_CATEGORY :] = hashed


def _part_name(split: str, number: int) -> str:
    return f"{split}-{number:06d}.bin"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Binary:
    """A converted click log.

    Attributes:
        directory: Holds the part files.
        header: All that header.json says.
    """

    directory: pathlib.Path
    header: Mapping[str, Any]

    @property
    def num_rows(self) -> Mapping[str, int]:
        """Rows of each split, `"train"` and `"validation"`."""
        return self.header["num_rows"]

    @property
    def part_rows(self) -> int:
        """Rows of each part file but a split's last."""
        return self.header["part_rows"]

    def parts(self, split: str) -> list[pathlib.Path]:
        """Returns the part files of a split, in order."""
        num_parts = -(-self.num_rows[split] // self.part_rows)
        return [self.directory / _part_name(split, n) for n in range(num_parts)]


def _prepared(name: str) -> Any:
    # It takes seconds to import, which files need not wait for.
    from models.criteo import tfds

    return tfds.Rows(name)


def sources(paths: data_files.Paths) -> list[Any]:
    """Returns where the rows of files, patterns and directories are."""
    return data_files.sources(
        paths, patterns=files.PATTERNS, file=files.File, prepared=_prepared
    )


def open_or_convert(
    paths: data_files.Paths,
    *,
    options: Options,
    cache_dir: data_files.Path | None = None,
) -> Binary:
    """Returns the fast form of files, which is made at the first call.

    A change of name, size, time of modification, beginning or end of a file
    makes for another form. It takes as much disk as the text, and half as much
    again while it is made.
    """
    found = sources(paths)
    directory = data_files.open_or_make(
        "criteo",
        lambda: {
            "version": _VERSION,
            "part_rows": PART_ROWS,
            "options": dataclasses.asdict(options),
            "sources": [source.identity() for source in found],
        },
        lambda aside: convert(found, options, aside),
        root=data_files.directory(cache_dir),
    )
    binary = Binary(
        directory=directory, header=data_files.read_header(directory)
    )
    for split, num_rows in binary.num_rows.items():
        for path in binary.parts(split):
            rows = min(num_rows, binary.part_rows)
            data_files.check_size(path, rows * criteo_rows.RECORD_BYTES)
            num_rows -= rows
    return binary
