"""Outer gradients as they travel: some of their numbers, in few bits each.

An outer gradient is by how much a group's weights fell behind the weights that
all groups have in common. Of each array, a chooser says which numbers go, and
the rest stay with the group: what is decoded, on all sides, is zero there. A
number is kept as a multiple of a scale that it shares with 255 others: in 8
bits, of the 127th part of the largest, and in one bit, of their mean magnitude,
which its sign says all about. Needs NumPy only.

An array is written as three uint32, the bytes of an index, how many numbers
follow, and their bits; the index, a bit for each number of the array, packed
and deflated, and no bytes if all go; one float32 scale for each 256 numbers;
and the numbers, an int8 each, or packed bits, of which a 1 is a plus.
"""

import math
import struct
import zlib
from collections.abc import Sequence

import numpy as np

from tfdistill.exchange import deltas

_BLOCK, _LARGEST = 256, 127
_HEADER = struct.Struct("<III")
BITS = 8, 1


def encode(
    arrays: Sequence[np.ndarray],
    choose: deltas.Chooser | None = None,
    *,
    bits: int = 8,
) -> list[bytes]:
    """Returns flat float32 arrays as blocks of a file.

    `choose` gets an array, and zeros for what was left out before. ValueError
    if they are not finite.
    """
    blocks = []
    for array in arrays:
        if not np.isfinite(array).all():
            raise ValueError(
                "An outer gradient must be finite, but the weights contain NaN "
                "or infinity. Lower the learning rate, or clip gradients."
            )
        sent, index = array, b""
        if choose is not None and array.size > 1:
            chosen = np.zeros(array.size, bool)
            chosen[choose(array, np.zeros_like(array))] = True
            sent = array[chosen]
            index = deltas.index_of(chosen, level=zlib.Z_DEFAULT_COMPRESSION)
        scale, numbers = (_in_8_bits if bits == 8 else _in_one_bit)(sent)
        blocks += [
            _HEADER.pack(len(index), sent.size, bits),
            index,
            scale.astype("<f4").tobytes(),
            numbers.tobytes(),
        ]
    return blocks


def _in_8_bits(sent: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scales, and the numbers."""
    padded = np.pad(sent, (0, -sent.size % _BLOCK)).reshape(-1, _BLOCK)
    scale = (np.abs(padded).max(axis=1) / _LARGEST).astype(np.float32)
    # A block of zeros needs a scale, too.
    divisor = np.where(scale > 0, scale, 1.0)[:, np.newaxis]
    numbers = np.clip(np.rint(padded / divisor), -_LARGEST, _LARGEST)
    return scale, numbers.astype(np.int8).reshape(-1)[: sent.size]


def _in_one_bit(sent: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scales, and the numbers."""
    starts = np.arange(0, sent.size, _BLOCK)
    lengths = np.diff([*starts, sent.size])
    sums = np.add.reduceat(np.abs(sent), starts) if sent.size else lengths
    return sums / lengths, np.packbits(sent > 0)


def decode(content: bytes, sizes: Sequence[int]) -> list[np.ndarray]:
    """Returns the arrays of a file, flat float32; ValueError if it is wrong."""
    found, rest = [], memoryview(content)
    for size in sizes:
        array, rest = _decoded(rest, size)
        found.append(array)
    if rest:
        raise ValueError(f"its file must end; {len(rest)} bytes are left.")
    return found


def _decoded(content: memoryview, size: int) -> tuple[np.ndarray, memoryview]:
    """Returns the first array of a file, and what is after it."""
    if len(content) < _HEADER.size:
        raise ValueError("its file is cut short.")
    index_bytes, num_sent, bits = _HEADER.unpack(content[: _HEADER.size])
    if bits not in BITS:
        raise ValueError(f"its numbers must have 8 bits or 1, not {bits}.")
    num_scales = math.ceil(num_sent / _BLOCK)
    num_bytes = math.ceil(num_sent * bits / 8)
    lengths = _HEADER.size, index_bytes, 4 * num_scales, num_bytes
    parts, start = [], 0
    for length in lengths:
        parts.append(content[start : start + length])
        start += length
    if start > len(content):
        raise ValueError("its file is cut short.")
    chosen = np.ones(size, bool)
    if index_bytes:
        chosen = deltas.chosen_by(parts[1], size)
    if np.count_nonzero(chosen) != num_sent:
        raise ValueError("its index must name as many numbers as the file has.")
    scale = np.repeat(np.frombuffer(parts[2], "<f4"), _BLOCK)[:num_sent]
    with np.errstate(over="ignore", invalid="ignore"):
        numbers = _signed(parts[3], num_sent, bits) * scale
    if not np.isfinite(numbers).all():
        raise ValueError("its numbers must be finite.")
    array = np.zeros(size, np.float32)
    array[chosen] = numbers
    return array, content[start:]


def _signed(content: memoryview, num_sent: int, bits: int) -> np.ndarray:
    if bits == 8:
        return np.frombuffer(content, np.int8)
    found = np.unpackbits(np.frombuffer(content, np.uint8), count=num_sent)
    return np.where(found, np.float32(1), np.float32(-1))
