"""Fields of text to numbers and hashes, many at a time.

The first eight bytes of a field are handled as one 64-bit word: most fields of
a click log are not longer. Longer ones are right too, and slower.
"""

import re

import numpy as np

__all__ = ["Text", "fingerprints", "integers", "mix"]

_MINUS, _ZERO = ord("-"), ord("0")
_WORD_BYTES = 8
_DIGITS = re.compile(rb"[0-9]+")
_INT64_MAX = 2**63 - 1
# By length, 0 to 8: the bytes of a little-endian word that belong to a field.
_MASKS = np.array([(1 << 8 * n) - 1 for n in range(9)], np.uint64)
# By length: as many zeros as stand before the digits to make eight.
_ZEROS_BEFORE = np.array(
    [int.from_bytes(b"0" * (8 - n), "little") for n in range(9)], np.uint64
)


class Text:
    """Bytes of which any eight in a row can be read as one word.

    Attributes:
        bytes: uint8, with some zeros after the end.
    """

    def __init__(self, block: bytes) -> None:
        padded = block + bytes(_WORD_BYTES)
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

    Args:
        text: Where the fields are.
        starts: Offset of each field, int64 of any shape.
        lengths: Its number of bytes, of the same shape.

    Returns:
        The values, int64 and 0 for what is none; and which are such numbers
        within 64 bits.
    """
    negative = (text.bytes[starts] == _MINUS) & (lengths > 0)
    starts = starts + negative
    lengths = lengths - negative
    num_digits = np.clip(lengths, 0, _WORD_BYTES)
    words = text.words(starts, lengths)
    # To the right of the word, which is where a number's last digit belongs.
    # Shifts by 64 are undefined, but an empty field's word is zero anyhow.
    words <<= (np.minimum(_WORD_BYTES - num_digits, 7) * 8).astype(np.uint64)
    words |= _ZEROS_BEFORE[num_digits]
    digits = words ^ _repeated(_ZERO)
    # The high bit of a byte is set if that byte is above 9.
    above = ((digits + _repeated(0x76)) | digits) & _repeated(0x80)
    valid = (above == 0) & (lengths > 0)
    # Pairs of digits, then of pairs, then of fours, within the word.
    digits = (digits * np.uint64(2561)) >> np.uint64(8)
    digits &= np.uint64(0x00FF00FF00FF00FF)
    digits = (digits * np.uint64(6553601)) >> np.uint64(16)
    digits &= np.uint64(0x0000FFFF0000FFFF)
    digits = (digits * np.uint64(42949672960001)) >> np.uint64(32)
    values = digits.astype(np.int64)
    values = np.where(negative, -values, values)
    for place in zip(*np.nonzero(lengths > _WORD_BYTES), strict=True):
        start = starts[place]
        field = text.bytes[start : start + lengths[place]].tobytes()
        valid[place], values[place] = _long_integer(field, negative[place])
    values[~valid] = 0
    return values, valid


def _long_integer(digits: bytes, negative: bool) -> tuple[bool, int]:
    # Python refuses to convert thousands of digits; no int64 has above 19.
    if not _DIGITS.fullmatch(digits):
        return False, 0
    digits = digits.lstrip(b"0") or b"0"
    if len(digits) > 19 or int(digits) > _INT64_MAX:
        return False, 0
    return True, -int(digits) if negative else int(digits)


def _repeated(byte: int) -> np.uint64:
    return np.uint64(int.from_bytes(bytes([byte] * 8), "little"))


def fingerprints(
    text: Text, starts: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """Returns a hash of each field's bytes and of its column.

    The same on all machines and in all versions of Python.

    Args:
        text: Where the fields are.
        starts: Offset of each field, int64 `[rows, columns]`.
        lengths: Its number of bytes, of the same shape.

    Returns:
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
