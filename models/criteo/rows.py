"""Rows of a click log as numbers: 40 little-endian 32-bit words each.

Categories are hashed as 64-bit words: most of a click log's have one.
"""

import numpy as np
import pyarrow as pa

NUM_INTEGERS = 13
NUM_CATEGORIES = 26
FIRST_CATEGORY = 1 + NUM_INTEGERS
NUM_COLUMNS = FIRST_CATEGORY + NUM_CATEGORIES
RECORD_BYTES = 4 * NUM_COLUMNS
# How rows are read, whatever they come from.
SCHEMA = pa.schema(
    [
        ("label", pa.bool_()),
        *((f"integer_{n}", pa.int64()) for n in range(NUM_INTEGERS)),
        *((f"category_{n}", pa.binary()) for n in range(NUM_CATEGORIES)),
    ]
)
# Rows of an embedding table that no hash gives.
MISSING_ROW = 0
RARE_ROW = 1
FIRST_HASHED_ROW = 2
_WORD_BYTES = 8
# By length, 0 to 8: the bytes of a little-endian word that belong to a field.
_MASKS = np.array([(1 << 8 * n) - 1 for n in range(9)], np.uint64)


def records(batch: pa.RecordBatch) -> np.ndarray:
    """Returns rows with fingerprints for categories, int32 `[rows, 40]`.

    The label and `sign(v) * log(1 + |v|)` of the integers, NaN if missing, are
    float32; the fingerprints are made by `fingerprints`.
    """
    columns = batch.columns
    floats = np.empty((len(batch), FIRST_CATEGORY), "<f4")
    floats[:, 0] = columns[0].to_numpy(zero_copy_only=False)
    for place, column in enumerate(columns[1:FIRST_CATEGORY], start=1):
        values = column.fill_null(0).to_numpy().astype(np.float32)
        floats[:, place] = np.copysign(np.log1p(np.abs(values)), values)
        missing = column.is_null().to_numpy(zero_copy_only=False)
        floats[missing, place] = np.nan
    categories = fingerprints(columns[FIRST_CATEGORY:])
    return np.concatenate([floats.view("<i4"), categories.view("<i4")], axis=1)


def fingerprints(columns: list[pa.BinaryArray]) -> np.ndarray:
    """Returns a hash of each text and of the number of its column.

    The same on all machines and in all versions of Python.

    uint32 `[rows, columns]`; 0 for empty texts and for no others.
    """
    joined = pa.concat_arrays([column.fill_null(b"") for column in columns])
    _, offsets, content = joined.buffers()
    text = bytes(content or b"") + bytes(_WORD_BYTES)
    ends = np.frombuffer(offsets, np.int32)[: len(joined) + 1]
    starts = ends[:-1].reshape(len(columns), -1).T
    lengths = np.diff(ends).reshape(len(columns), -1).T
    numbers = np.arange(1, len(columns) + 1, dtype=np.uint64)
    hashes = _words(text, starts, lengths)
    hashes ^= mix(numbers)
    hashes += lengths.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mix(hashes)
    for offset in range(_WORD_BYTES, int(lengths.max(initial=0)), _WORD_BYTES):
        longer = np.nonzero(lengths > offset)
        words = _words(text, starts[longer] + offset, lengths[longer] - offset)
        hashes[longer] = mix(hashes[longer] ^ words)
    found = (hashes >> np.uint64(32)).astype(np.uint32)
    # Zero says that there is no text.
    np.maximum(found, 1, out=found)
    found[lengths == 0] = 0
    return found


def _words(text: bytes, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns the first eight bytes of fields, zeros after their end."""
    size = len(text) - _WORD_BYTES + 1
    every = np.ndarray((size,), dtype="<u8", buffer=text, strides=(1,))
    words = every[starts].astype(np.uint64, copy=False)
    words &= _MASKS[np.clip(lengths, 0, _WORD_BYTES)]
    return words


def mix(words: np.ndarray) -> np.ndarray:
    """Scrambles 64-bit words in place: splitmix64 (Steele et al. 2014)."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


def hashed_rows(
    fingerprints: np.ndarray, field_sizes: np.ndarray
) -> np.ndarray:
    """Returns the row of each category in its column's embedding table.

    int32 `[rows, 26]`: 0 if missing, else from 2 to the size - 1. Row 1 is
    left for rare categories.
    """
    spread = np.asarray(field_sizes, np.uint32) - FIRST_HASHED_ROW
    hashed = (fingerprints % spread).astype(np.int32)
    hashed += FIRST_HASHED_ROW
    hashed[fingerprints == 0] = MISSING_ROW
    return hashed
