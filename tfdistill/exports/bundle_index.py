"""A checkpoint from elsewhere, read by our own code instead of TensorFlow's.

TensorFlow's reader trusts the index of a checkpoint: one that claims a shape
of 2^40 x 2^40, or a block of 2^60 bytes, ends the process that opens it. So
the index of a peer's version is read here first, as hostile input. What passes
names only tensors that lie in its files, piece by piece, and TensorFlow may
open it. The values of a student's own graph are read here as well.

The index is a sorted table, as LevelDB writes it: blocks of keys and values, a
block that says where these are, and a footer that says where that one is. The
values are `BundleEntryProto`; the first one, of the empty key, is the header.
"""

import dataclasses
import math
import struct
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import tensor_bundle_pb2

from tfdistill.exchange import filesystem

MAX_INDEX_BYTES = 64 * 1024**2
MAX_ENTRIES = 500_000
# As many files as a version may have.
MAX_SHARDS = 10_000
# Far from where a product of sizes no longer fits into 64 bits.
_MAX_ELEMENTS = 2**48
_MAX_RANK = 32
_FOOTER_BYTES = 48
_TRAILER_BYTES = 5
_MAGIC = 0xDB4775248B80FB57


class BundleError(ValueError):
    """A checkpoint that must not be opened; the message says why."""


class Piece(NamedTuple):
    """Where a tensor, or a slice of it that begins at `start`, lies."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a checkpoint, whole or in slices."""

    dtype: tf.DType
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclasses.dataclass(frozen=True)
class Index:
    """What a checkpoint holds: tensors by key, in so many data files."""

    num_shards: int
    tensors: Mapping[str, Tensor]


def parse(content: bytes) -> Index:
    """Reads the bytes of an index; raises BundleError."""
    try:
        entries = dict(_entries(content))
    except (IndexError, struct.error) as error:
        raise BundleError("its index must be whole; it is not.") from error
    header = _message("BundleHeaderProto", entries.pop(b"", b""))
    found = {
        key: _message("BundleEntryProto", value)
        for key, value in entries.items()
    }
    _require(
        header.endianness == header.LITTLE, "in little endian byte order", "big"
    )
    _require(
        1 <= header.num_shards <= MAX_SHARDS,
        f"of 1 to {MAX_SHARDS} data files",
        header.num_shards,
    )
    slices = {
        _slice_key(key, extents): key
        for key, entry in found.items()
        for extents in _all_extents(entry)
    }
    num_slices = sum(len(entry.slices) for entry in found.values())
    _require(
        len(slices) == num_slices and slices.keys() <= found.keys(),
        "complete, with each of its slices once",
        f"{num_slices} slices",
    )
    pieces = {
        key: _piece(key, entry, header.num_shards)
        for key, entry in found.items()
        if not entry.slices
    }
    tensors = {}
    for key, entry in found.items():
        if key not in slices:
            tensors[_text(key)] = _tensor(key, entry, found, pieces)
    return Index(header.num_shards, tensors)


def load(file_system: filesystem.FileSystem, prefix: str) -> Index:
    """Reads and checks the index of a checkpoint, and its files' sizes."""
    path = f"{prefix}.index"
    index = parse(filesystem.read(file_system, path, max_bytes=MAX_INDEX_BYTES))
    sizes = []
    for shard in range(index.num_shards):
        path = _data_path(prefix, shard, index)
        try:
            sizes.append(file_system.stat(path).size)
        except FileNotFoundError as error:
            raise BundleError(
                f"its checkpoint must have {index.num_shards} data files; "
                f"{path} is missing."
            ) from error
    for key, tensor in index.tensors.items():
        for piece in tensor.pieces:
            _require(
                piece.offset + piece.size <= sizes[piece.shard],
                "within its data files",
                f"{key!r} beyond the end of one",
            )
    return index


def check(file_system: filesystem.FileSystem, prefix: str) -> None:
    """Raises BundleError unless TensorFlow may open the checkpoint."""
    index = load(file_system, prefix)
    texts = {k: t for k, t in index.tensors.items() if t.dtype == tf.string}
    for key, content in _contents(file_system, prefix, index, texts).items():
        _check_texts(key, math.prod(texts[key].shape), content[0])


def read(
    file_system: filesystem.FileSystem,
    prefix: str,
    index: Index,
    keys: Sequence[str],
) -> Iterator[np.ndarray]:
    """Yields tensors of numbers, none of which is text, and forgets each."""
    wanted = {key: index.tensors[key] for key in keys}
    contents = _contents(file_system, prefix, index, wanted)
    for key in keys:
        yield _array(wanted[key], contents.pop(key))


def _array(tensor: Tensor, contents: Sequence[bytearray]) -> np.ndarray:
    dtype = tensor.dtype.as_numpy_dtype
    parts = []
    for piece, content in zip(tensor.pieces, contents, strict=True):
        if tensor.dtype == tf.bool:
            part = np.frombuffer(content, np.uint8) != 0
        else:
            part = np.frombuffer(content, dtype)
        parts.append(part.reshape(piece.shape))
    if len(parts) == 1:
        return parts[0]
    whole = np.empty(tensor.shape, dtype)
    for piece, part in zip(tensor.pieces, parts, strict=True):
        ends = zip(piece.start, piece.shape, strict=True)
        whole[tuple(slice(begin, begin + size) for begin, size in ends)] = part
    return whole


def _contents(
    file_system: filesystem.FileSystem,
    prefix: str,
    index: Index,
    tensors: Mapping[str, Tensor],
) -> dict[str, list[bytearray]]:
    """Reads the bytes of each piece, from one pass over each file."""
    contents = {
        key: [bytearray(piece.size) for piece in tensor.pieces]
        for key, tensor in tensors.items()
    }
    by_shard: dict[int, list[tuple[int, bytearray]]] = {}
    for key, tensor in tensors.items():
        for piece, content in zip(tensor.pieces, contents[key], strict=True):
            if content:
                targets = by_shard.setdefault(piece.shard, [])
                targets.append((piece.offset, content))
    for shard, targets in by_shard.items():
        path = _data_path(prefix, shard, index)
        end = 0
        for block in file_system.blocks(path):
            begin, end = end, end + len(block)
            for offset, content in targets:
                first = max(offset, begin)
                last = min(offset + len(content), end)
                if first < last:
                    content[first - offset : last - offset] = block[
                        first - begin : last - begin
                    ]
            targets = [t for t in targets if t[0] + len(t[1]) > end]
            if not targets:
                break
        _require(not targets, "within its data files", f"{path} cut short")
    return contents


def _data_path(prefix: str, shard: int, index: Index) -> str:
    return f"{prefix}.data-{shard:05d}-of-{index.num_shards:05d}"


def _check_texts(key: str, number: int, content: bytearray) -> None:
    """Texts lie behind their lengths and four bytes of a checksum."""
    position = total = 0
    try:
        for _ in range(number):
            length, position = _varint(content, position)
            total += length
    except IndexError:
        total = -1
    _require(
        not number or position + 4 + total == len(content),
        "made of texts as long as it says",
        f"{key!r}",
    )


# ---- entries ----


def _tensor(
    key: bytes,
    entry: Any,
    found: Mapping[bytes, Any],
    pieces: Mapping[bytes, Piece],
) -> Tensor:
    dtype, shape = tf.as_dtype(entry.dtype), _shape(key, entry.shape)
    if not entry.slices:
        return Tensor(dtype, shape, (pieces[key],))
    parts = []
    for extents in _all_extents(entry):
        of_slice = _slice_key(key, extents)
        part = pieces.get(of_slice)
        if part is not None and found[of_slice].dtype == entry.dtype:
            begins = tuple(begin for begin, _ in extents)
            parts.append(part._replace(start=begins))
    _require(
        len(parts) == len(entry.slices) and _is_whole(parts, shape),
        "made of slices that are the whole",
        f"those of {key!r}",
    )
    return Tensor(dtype, shape, tuple(parts))


def _is_whole(parts: Sequence[Piece], shape: tuple[int, ...]) -> bool:
    """Whether slices follow each other in one dimension, and span all others.

    That is how variables are partitioned.
    """
    for dim, size in enumerate(shape):
        before, after = shape[:dim], shape[dim + 1 :]
        end = 0
        for part in sorted(parts, key=lambda part: part.start[dim : dim + 1]):
            begin = (*[0] * len(before), end, *[0] * len(after))
            length = part.shape[dim] if dim < len(part.shape) else -1
            if part.start != begin or part.shape != (*before, length, *after):
                break
            end += length
        else:
            if end == size:
                return True
    return False


def _piece(key: bytes, entry: Any, num_shards: int) -> Piece:
    dtype, shape = entry.dtype, _shape(key, entry.shape)
    num_elements = math.prod(shape)
    is_text = dtype == tf.string.as_datatype_enum
    _require(
        dtype in _ITEM_BYTES or is_text,
        "made of numbers or texts",
        f"dtype {dtype} in {key!r}",
    )
    fits = (
        num_elements <= entry.size
        if is_text
        else entry.size == num_elements * _ITEM_BYTES[dtype]
    )
    _require(
        fits
        and 0 <= entry.size <= 2**62
        and 0 <= entry.offset <= 2**62
        and 0 <= entry.shard_id < num_shards,
        "of the sizes that its shapes have",
        f"{entry.size} bytes for {list(shape)} in {key!r}",
    )
    return Piece(
        (0,) * len(shape), shape, entry.shard_id, entry.offset, entry.size
    )


def _shape(key: bytes, shape: Any) -> tuple[int, ...]:
    sizes = tuple(dim.size for dim in shape.dim[: _MAX_RANK + 1])
    _require(
        not shape.unknown_rank
        and len(sizes) <= _MAX_RANK
        and all(size >= 0 for size in sizes)
        and math.prod(max(size, 1) for size in sizes) <= _MAX_ELEMENTS,
        f"of shapes with at most {_MAX_ELEMENTS} elements",
        f"{list(sizes)} in {key!r}",
    )
    return sizes


def _message(kind: str, content: bytes) -> Any:
    try:
        return getattr(tensor_bundle_pb2, kind).FromString(content)
    except Exception as error:  # protobuf's own kind; it comes by TensorFlow.
        raise BundleError(
            f"its index must be made of {kind}; it is not."
        ) from error


def _text(key: bytes) -> str:
    try:
        return key.decode()
    except UnicodeDecodeError as error:
        raise BundleError(
            f"its index must name tensors in UTF-8; received {key!r}."
        ) from error


_ITEM_BYTES = {
    dtype.as_datatype_enum: dtype.size
    for dtype in (
        *(tf.bool, tf.float16, tf.bfloat16, tf.float32, tf.float64),
        *(tf.int8, tf.int16, tf.int32, tf.int64, tf.complex64, tf.complex128),
        *(tf.uint8, tf.uint16, tf.uint32, tf.uint64),
    )
}


# ---- the keys of slices, as TensorFlow's OrderedCode writes them ----


def _all_extents(entry: Any) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yields first index and length by dimension; all of it is (0, -1)."""
    for part in entry.slices:
        yield tuple(
            (e.start, e.length if e.HasField("length") else -1)
            for e in part.extent[: _MAX_RANK + 1]
        )


def _slice_key(key: bytes, extents: Sequence[tuple[int, int]]) -> bytes:
    # Those two bytes would have to be escaped.
    _require(not {0, 0xFF} & set(key), "of slices with plain names", f"{key!r}")
    number = len(extents)
    code = b"\0" + key + b"\0\1" + (bytes([1, number]) if number else b"\0")
    return code + b"".join(_signed(n) for extent in extents for n in extent)


def _signed(number: int) -> bytes:
    length = (number if number >= 0 else ~number).bit_length() // 7 + 1
    # The leading bits say how many bytes there are, turned for numbers < 0.
    code = bytearray(number.to_bytes(10, "big", signed=True)[-length:])
    header = ((1 << length) - 1) << (16 - length)
    code[0] ^= header >> 8
    if length > 1:
        code[1] ^= header & 0xFF
    return bytes(code)


# ---- the table ----


def _entries(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields keys and values; they ascend, and no block lies in another."""
    _require(
        _FOOTER_BYTES <= len(content) <= MAX_INDEX_BYTES,
        f"of {_FOOTER_BYTES} to {MAX_INDEX_BYTES} bytes",
        len(content),
    )
    footer = content[-_FOOTER_BYTES:]
    _require(
        int.from_bytes(footer[-8:], "little") == _MAGIC,
        "a checkpoint's, by its last bytes",
        footer[-8:].hex(),
    )
    metadata, position = _handle(footer, 0)
    blocks, _ = _handle(footer, position)
    _block(content, metadata, MAX_ENTRIES)
    last, left, used = None, MAX_ENTRIES, 0
    for _, value in _block(content, blocks, MAX_ENTRIES):
        handle, _ = _handle(value, 0)
        _require(handle[0] >= used, "in order", "blocks that overlap")
        used = sum(handle) + _TRAILER_BYTES
        for key, entry in _block(content, handle, left):
            _require(last is None or key > last, "in order", f"{key!r}")
            last = key
            left -= 1
            yield key, entry


def _block(
    content: bytes, handle: tuple[int, int], most: int
) -> list[tuple[bytes, bytes]]:
    offset, size = handle
    end = offset + size
    _require(
        size >= 8 and end + _TRAILER_BYTES <= len(content) - _FOOTER_BYTES,
        "made of blocks inside of it",
        f"{size} bytes at {offset}",
    )
    _require(content[end] == 0, "uncompressed", "a compressed block")
    (num_restarts,) = struct.unpack("<I", content[end - 4 : end])
    limit = end - 4 - 4 * num_restarts
    _require(num_restarts and limit >= offset, "whole", "a block without end")
    restarts = struct.unpack(f"<{num_restarts}I", content[limit : end - 4])
    found: list[tuple[bytes, bytes]] = []
    begins = set()
    key, position = b"", offset
    while position < limit:
        begin = position - offset
        shared, position = _varint(content, position)
        added, position = _varint(content, position)
        length, position = _varint(content, position)
        _require(
            shared <= len(key)
            and position + added + length <= limit
            and len(found) < most,
            f"whole, with at most {MAX_ENTRIES} entries",
            f"an entry at {begin}",
        )
        if not shared:
            begins.add(begin)
        key = key[:shared] + content[position : position + added]
        position += added
        found.append((key, content[position : position + length]))
        position += length
    _require(
        restarts[0] == 0 and (begins.issuperset(restarts) or not found),
        "whole",
        "entries that begin nowhere",
    )
    return found


def _handle(content: bytes, position: int) -> tuple[tuple[int, int], int]:
    offset, position = _varint(content, position)
    size, position = _varint(content, position)
    return (offset, size), position


def _varint(content: bytes | bytearray, position: int) -> tuple[int, int]:
    result = 0
    for shift in range(0, 70, 7):
        byte = content[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, position
    raise BundleError("its index must be whole; received a number too long.")


def _require(holds: object, must_be: str, received: Any) -> None:
    if not holds:
        raise BundleError(
            f"its checkpoint must be {must_be}; received {str(received)[:200]}."
        )
