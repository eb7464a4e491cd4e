"""The fast form of a click log: split, converted, written once, opened.

A row is 40 little-endian 32-bit words: the label and 13 transformed integers
as float32 (NaN if missing), then 26 rows of embedding tables as int32. A
split is a sequence of part files of equal length; header.json says the rest.
"""

import dataclasses
import os
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


def part_name(split: str, number: int) -> str:
    """Returns the name of a part file."""
    return f"{split}-{number:06d}.bin"


class Writer:
    """Collects rows of one split, and writes each part once it is full.

    Attributes:
        split: Name of the split.
    """

    def __init__(self, directory: pathlib.Path, split: str) -> None:
        """Writes nothing yet."""
        self.split = split
        self._directory = directory
        self._rest: list[np.ndarray] = []
        self._num_rest = 0
        self._num_parts = 0
        self._num_rows = 0

    def add(self, records: np.ndarray) -> None:
        """Adds rows, `[rows, words]`."""
        self._rest.append(records)
        self._num_rest += len(records)
        self._num_rows += len(records)
        if self._num_rest < PART_ROWS:
            return
        joined = np.concatenate(self._rest)
        whole = len(joined) - len(joined) % PART_ROWS
        for first in range(0, whole, PART_ROWS):
            self._write(joined[first : first + PART_ROWS])
        self._rest, self._num_rest = [joined[whole:]], len(joined) - whole

    def finish(self) -> int:
        """Writes the last part; returns the number of rows in all."""
        if self._num_rest:
            self._write(np.concatenate(self._rest))
        return self._num_rows

    def _write(self, records: np.ndarray) -> None:
        path = self._directory / part_name(self.split, self._num_parts)
        path.write_bytes(np.ascontiguousarray(records, "<i4").data)
        self._num_parts += 1


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
            rare categories. Default 10,000.
        min_count: Categories that come fewer times in the training rows get
            row 1. Default 1: none does.
        split: `"hash"` (default): which rows validate is drawn; `"time"`: the
            last ones do, if rows are in the order of time.
        validation_fraction: Share of the rows that validate, in (0, 1).
            Default 1/6.
        split_seed: Of the draws, >= 0. Keep it fixed between runs that are to
            be compared: it is not the seed of a run. Default 0.
        num_train: Keep only so many training rows, drawn from all of them.
            Default None: all.
        num_validation: Likewise of the validation rows.
        malformed: Faulty lines are counted and skipped (`"skip"`, the
            default), or the first is an error (`"refuse"`).
    """

    field_sizes: int | Sequence[int] = DEFAULT_FIELD_SIZE
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
        _check_one_of("malformed", self.malformed, files.POLICIES)
        data_files.check_at_least("min_count", self.min_count, 1)
        data_files.check_at_least("split_seed", self.split_seed, 0)
        for name in ("num_train", "num_validation"):
            if getattr(self, name) is not None:
                data_files.check_at_least(name, getattr(self, name), 1)
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


TRAIN, VALIDATION, UNUSED = 0, 1, 2
# Draws for the split itself, and for the rows kept if fewer are wanted.
_SPLIT_DRAW, _TRAIN_DRAW, _VALIDATION_DRAW = 1, 2, 3


def assign(num_rows: int, *, options: Options) -> np.ndarray:
    """Says of each row what it is for.

    uint8 `[num_rows]`: `TRAIN`, `VALIDATION` or `UNUSED`.
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
    return criteo_rows.mix(np.arange(num_rows, dtype=np.uint64) + key)


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

    Of one column in the training rows, uint32, without that of missing text.
    """
    values, counts = np.unique(fingerprints, return_counts=True)
    return values[(counts >= min_count) & (values > 0)]


_RECORD_WORDS = criteo_rows.NUM_COLUMNS
_FIRST_CATEGORY = criteo_rows.NUM_COLUMNS - criteo_rows.NUM_CATEGORIES
# Values of columns counted at once: about half a gigabyte with their order.
_COUNTED_VALUES = 1 << 26
_WINDOW_ROWS = 1 << 16


def convert(
    reader: files.Reader,
    options: Options,
    directory: pathlib.Path,
) -> dict[str, Any]:
    """Fills a directory: one pass over the text, two over numbers.

    Memory is bounded but for some bytes per row, most of them while rare
    categories are looked for.

    Returns rows of each split, rows read, and malformed lines by reason.
    """
    everything = directory / "everything.tmp"
    _write_everything(reader, everything)
    records = np.memmap(everything, "<i4", "r").reshape(-1, _RECORD_WORDS)
    kinds = assign(len(records), options=options)
    kept = _frequent(records, kinds, options.min_count)
    num_rows = _write_splits(records, kinds, kept, options, directory)
    del records
    everything.unlink()
    return {
        "num_rows": num_rows,
        "num_rows_read": reader.num_rows,
        "malformed": dict(reader.counts),
    }


def _write_everything(reader: files.Reader, path: pathlib.Path) -> None:
    """Writes all rows, still with fingerprints for categories."""
    progress = data_files.Progress()
    with path.open("wb") as opened:
        for rows in reader.rows():
            records = records_of(rows, rows.fingerprints.view(np.int32))
            opened.write(records.tobytes())
            progress.report(
                f"Criteo: converting once: {reader.num_rows} rows, "
                f"{reader.share_read:.0%} of the files"
            )


def records_of(rows: criteo_rows.Rows, categories: np.ndarray) -> np.ndarray:
    """Returns int32 `[rows, 40]`, as they stand in the files."""
    floats = np.empty((len(rows), _FIRST_CATEGORY), "<f4")
    floats[:, 0] = rows.labels
    floats[:, 1:] = criteo_rows.log_integers(rows)
    return np.concatenate([floats.view("<i4"), categories], axis=1)


def _frequent(
    records: np.ndarray, kinds: np.ndarray, min_count: int
) -> list[np.ndarray] | None:
    """Returns the kept fingerprints of each column; None: all of them."""
    if min_count == 1:
        return None
    train = np.flatnonzero(kinds == TRAIN)
    at_once = max(1, _COUNTED_VALUES // len(train))
    kept: list[np.ndarray] = []
    for first in range(_FIRST_CATEGORY, _RECORD_WORDS, at_once):
        columns = records[train, first : first + at_once].view(np.uint32)
        kept += [frequent(column, min_count=min_count) for column in columns.T]
    return kept


def _write_splits(
    records: np.ndarray,
    kinds: np.ndarray,
    kept: list[np.ndarray] | None,
    options: Options,
    directory: pathlib.Path,
) -> dict[str, int]:
    sizes = np.array(options.field_sizes, np.uint32)
    writers = {
        TRAIN: Writer(directory, "train"),
        VALIDATION: Writer(directory, "validation"),
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
    nearest = np.searchsorted(kept, fingerprints).clip(max=len(kept) - 1)
    return (kept[nearest] != fingerprints) & (fingerprints > 0)


# Change it with anything that changes what is written.
_VERSION = 1
_RECORD_BYTES = 4 * criteo_rows.NUM_COLUMNS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Binary:
    """A converted click log.

    Attributes:
        directory: Holds the part files.
        num_rows: By split, `"train"` and `"validation"`.
        part_rows: Rows of each part file but a split's last.
        header: All that header.json says.
    """

    directory: pathlib.Path
    num_rows: Mapping[str, int]
    part_rows: int
    header: Mapping[str, Any]

    def parts(self, split: str) -> list[pathlib.Path]:
        """Returns the part files of a split, in order."""
        num_parts = -(-self.num_rows[split] // self.part_rows)
        names = (part_name(split, n) for n in range(num_parts))
        return [self.directory / name for name in names]


def open_or_convert(
    paths: files.Paths,
    *,
    options: Options,
    cache_dir: data_files.Path | None = None,
) -> Binary:
    """Returns the fast form of files, which is made at the first call.

    A change of name, size, time of modification, beginning or end of a file
    makes for another form. It takes as much disk as the text, and half as much
    again while it is made.
    """
    reader = files.Reader(_with_prepared(paths), malformed=options.malformed)

    def describe() -> dict[str, Any]:
        return {
            "version": _VERSION,
            "part_rows": PART_ROWS,
            "options": dataclasses.asdict(options),
            "sources": [source.identity() for source in reader.sources],
        }

    return _open(
        data_files.open_or_make(
            "criteo",
            describe,
            lambda aside: convert(reader, options, aside),
            root=data_files.directory(cache_dir),
        )
    )


def _with_prepared(paths: files.Paths) -> list[Any]:
    """Returns the paths, but each prepared data set as the source it is."""
    found: list[Any] = []
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        if str(path).startswith(data_files.PREFIX):
            # It takes seconds to import, which files need not wait for.
            from models.criteo import tfds

            found.append(tfds.Rows(str(path).removeprefix(data_files.PREFIX)))
        else:
            found.append(path)
    return found


def _open(directory: pathlib.Path) -> Binary:
    header = data_files.read_header(directory)
    binary = Binary(
        directory=directory,
        num_rows=header["num_rows"],
        part_rows=header["part_rows"],
        header=header,
    )
    for split, num_rows in binary.num_rows.items():
        for path in binary.parts(split):
            rows = min(num_rows, binary.part_rows)
            data_files.check_size(path, rows * _RECORD_BYTES)
            num_rows -= rows
    return binary
