"""Criteo's display-ads format: from bytes of whole lines to arrays.

A row has 40 columns with TABs between them: a label (0 or 1), 13 integers that
may be missing or negative, and 26 categories, which are any text and may be
missing too. Nothing is quoted. Whole blocks are parsed at once with NumPy.

Categories are handled as 64-bit words: most of a click log's have one.
"""

import dataclasses

import numpy as np

_TAB, _NEWLINE, _RETURN, _ZERO, _MINUS = b"\t\n\r0-"
_WORD_BYTES = 8
# An int64 holds any number of so many.
_MAX_DIGITS = 18
# By length, 0 to 8: the bytes of a little-endian word that belong to a field.
_MASKS = np.array([(1 << 8 * n) - 1 for n in range(9)], np.uint64)


class Text:
    """Bytes of which any eight in a row can be read as one word.

    Attributes:
        bytes: uint8, with some zeros after the end.
    """

    def __init__(self, block: bytes) -> None:
        padded = block + bytes(_MAX_DIGITS)
        self.bytes = np.frombuffer(padded, np.uint8)
        self._words = np.ndarray(
            (len(block) + 1,), dtype="<u8", buffer=padded, strides=(1,)
        )

    def words(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Returns the first eight bytes of fields, zeros after their end."""
        words = self._words[starts].astype(np.uint64, copy=False)
        words &= _MASKS[np.clip(lengths, 0, _WORD_BYTES)]
        return words


def integers(
    text: Text, starts: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the values of fields of decimal digits, perhaps after a minus.

    `starts` are offsets, `lengths` bytes, of any shape. The values are int64,
    and 0 if the second result says that there is no such number, or that it
    has more than 18 digits.
    """
    shape = lengths.shape
    starts, lengths = starts.ravel(), lengths.ravel()
    negative = (text.bytes[starts] == _MINUS) & (lengths > 0)
    starts, lengths = starts + negative, lengths - negative
    valid = (lengths > 0) & (lengths <= _MAX_DIGITS)
    values = np.zeros(len(valid), np.int64)
    left = np.flatnonzero(valid)
    for place in range(_MAX_DIGITS):
        left = left[lengths[left] > place]  # Soon few, and then none.
        digits = text.bytes[starts[left] + place] - np.uint8(_ZERO)
        values[left] = 10 * values[left] + digits
        valid[left] &= digits < 10
    values[negative] *= -1
    values[~valid] = 0
    return values.reshape(shape), valid.reshape(shape)


def fingerprints(
    text: Text, starts: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """Returns a hash of each field's bytes and of its column.

    The same on all machines and in all versions of Python.

    uint32 `[rows, columns]`; 0 for empty fields and for no others.
    """
    columns = np.arange(1, starts.shape[-1] + 1, dtype=np.uint64)
    hashes = text.words(starts, lengths)
    hashes ^= mix(columns)
    hashes += lengths.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mix(hashes)
    for offset in range(_WORD_BYTES, int(lengths.max(initial=0)), _WORD_BYTES):
        longer = np.nonzero(lengths > offset)
        words = text.words(starts[longer] + offset, lengths[longer] - offset)
        hashes[longer] = mix(hashes[longer] ^ words)
    found = (hashes >> np.uint64(32)).astype(np.uint32)
    # Zero says that there is no text.
    np.maximum(found, 1, out=found)
    found[lengths == 0] = 0
    return found


def mix(words: np.ndarray) -> np.ndarray:
    """Scrambles 64-bit words in place: splitmix64 (Steele et al. 2014)."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


NUM_INTEGERS = 13
NUM_CATEGORIES = 26
FIRST_CATEGORY = 1 + NUM_INTEGERS
NUM_COLUMNS = FIRST_CATEGORY + NUM_CATEGORIES
# Of a row in the fast form.
RECORD_BYTES = 4 * NUM_COLUMNS
# What may be wrong with a line. Index 0 stands for a good one.
REASONS = (
    "",
    "blank_line",
    "too_few_columns",
    "too_many_columns",
    "invalid_utf8",
    "header",
    "bad_label",
    "bad_integer",
)
# Rows of an embedding table that no hash gives.
MISSING_ROW = 0
RARE_ROW = 1
FIRST_HASHED_ROW = 2

_CODES = {reason: code for code, reason in enumerate(REASONS)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Parsed rows.

    Attributes:
        labels: 0 or 1, uint8 `[rows]`.
        integers: int64 `[rows, 13]`; 0 if missing.
        missing: Which integers are missing, bool `[rows, 13]`.
        fingerprints: A hash of each category and its column, uint32
            `[rows, 26]`; 0 if missing.
    """

    labels: np.ndarray
    integers: np.ndarray
    missing: np.ndarray
    fingerprints: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parsed:
    """What a block of lines holds.

    Attributes:
        rows: The good lines.
        reasons: Per line an index of `REASONS`, uint8 `[lines]`; 0 is good.
        line_starts: Offset of each line in the block, int64 `[lines]`.
        line_ends: Offset of the line feed that ends it, int64 `[lines]`.
    """

    rows: Rows
    reasons: np.ndarray
    line_starts: np.ndarray
    line_ends: np.ndarray


def parse(block: bytes, *, starts_file: bool = False) -> Parsed:
    r"""Returns the rows of a block of lines.

    The last line has its line feed; lines may end in CR LF. The first line of a
    file may be a header.

    Example:
        >>> row = b"1\t5\t-2" + 37 * b"\t" + b"\n"
        >>> parsed = parse(row + b"x\n")
        >>> parsed.rows.integers[0, :3].tolist(), parsed.reasons.tolist()
        ([5, -2, 0], [0, 2])
    """
    if block and not block.endswith(b"\n"):
        raise ValueError(
            "`block` must end in a line feed; received one that ends in "
            f"{block[-1:]!r}. Add the rest of the last line."
        )
    text = Text(block)
    # One comparison for both separators: TAB is 9 and the line feed 10.
    separators = np.flatnonzero((text.bytes - np.uint8(_TAB)) < 2)
    last = np.flatnonzero(text.bytes[separators] == _NEWLINE)
    num_columns = np.diff(last, prepend=-1)
    line_ends = separators[last]
    line_starts = np.zeros_like(line_ends)
    line_starts[1:] = line_ends[:-1] + 1
    reasons = np.zeros(len(last), np.uint8)
    reasons[num_columns < NUM_COLUMNS] = _CODES["too_few_columns"]
    reasons[num_columns > NUM_COLUMNS] = _CODES["too_many_columns"]
    returns = text.bytes[line_ends - 1] == _RETURN
    lengths = line_ends - line_starts
    blank = (lengths == 0) | ((lengths == 1) & returns)
    reasons[blank] = _CODES["blank_line"]
    for line in _undecodable(block, line_starts, line_ends):
        reasons[line] = _CODES["invalid_utf8"]

    lines = np.flatnonzero(reasons == 0)
    ends = separators[last[lines, np.newaxis] + np.arange(1 - NUM_COLUMNS, 1)]
    starts = np.empty_like(ends)
    starts[:, 0] = line_starts[lines]
    starts[:, 1:] = ends[:, :-1] + 1
    ends[:, -1] -= returns[lines]
    rows, wrong = _rows(text, starts, ends - starts)
    header = starts_file & (lines == 0) & wrong["header"]
    reasons[lines[wrong["bad_integer"]]] = _CODES["bad_integer"]
    reasons[lines[wrong["bad_label"]]] = _CODES["bad_label"]
    reasons[lines[header]] = _CODES["header"]
    return Parsed(
        rows=_select(rows, reasons[lines] == 0),
        reasons=reasons,
        line_starts=line_starts,
        line_ends=line_ends,
    )


def _rows(
    text: Text, starts: np.ndarray, lengths: np.ndarray
) -> tuple[Rows, dict[str, np.ndarray]]:
    """Returns all rows with 40 columns, and by reason which are wrong."""
    labels = text.bytes[starts[:, 0]] - np.uint8(_ZERO)
    bad_label = (lengths[:, 0] != 1) | (labels > 1)
    part = slice(1, FIRST_CATEGORY)
    missing = lengths[:, part] == 0
    values, valid = integers(text, starts[:, part], lengths[:, part])
    bad_integer = ~(valid | missing)
    wrong = {
        "bad_label": bad_label,
        "bad_integer": bad_integer.any(axis=1),
        # Names of columns, where numbers should be.
        "header": bad_label & bad_integer.all(axis=1),
    }
    rows = Rows(
        labels=labels,
        integers=values,
        missing=missing,
        fingerprints=fingerprints(
            text, starts[:, FIRST_CATEGORY:], lengths[:, FIRST_CATEGORY:]
        ),
    )
    return rows, wrong


def _select(rows: Rows, good: np.ndarray) -> Rows:
    if good.all():
        return rows
    arrays = vars(rows).items()
    return Rows(**{name: array[good] for name, array in arrays})


def _undecodable(
    block: bytes, line_starts: np.ndarray, line_ends: np.ndarray
) -> list[int]:
    """Returns the lines that are not UTF-8; mostly none, found at once."""
    try:
        block.decode()
    except UnicodeDecodeError:
        found = []
        for line, (start, end) in enumerate(
            zip(line_starts.tolist(), line_ends.tolist(), strict=True)
        ):
            try:
                block[start:end].decode()
            except UnicodeDecodeError:
                found.append(line)
        return found
    return []


def log_integers(rows: Rows) -> np.ndarray:
    """Returns `sign(v) * log(1 + |v|)`, `[rows, 13]`; NaN if missing."""
    values = rows.integers.astype(np.float32)
    logs = np.copysign(np.log1p(np.abs(values)), values)
    logs[rows.missing] = np.nan
    return logs


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
