"""Indexes of checkpoints as TensorFlow writes them, or as nobody should."""

import struct
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import tensor_bundle_pb2

from tfdistill.exports import bundle_index

_MAGIC = 0xDB4775248B80FB57


def entries(index: bytes) -> dict[bytes, bytes]:
    """The values of an index by key, that of the header by the empty one."""
    return dict(bundle_index._entries(index))


def change(index: bytes, key: str, edit: Callable[[Any], object]) -> bytes:
    """An index in which one entry, or for "" the header, was edited."""
    found = entries(index)
    kind = "Entry" if key else "Header"
    proto = getattr(tensor_bundle_pb2, f"Bundle{kind}Proto")()
    proto.ParseFromString(found.get(key.encode(), b""))
    edit(proto)
    return table({**found, key.encode(): proto.SerializeToString()})


def with_shape(index: bytes, *sizes: int) -> bytes:
    """An index whose first tensor of numbers claims these sizes."""
    key = next(
        key
        for key, tensor in bundle_index.parse(index).tensors.items()
        if tensor.dtype != tf.string
    )

    def edit(proto: Any) -> None:
        del proto.shape.dim[:]
        for size in sizes:
            proto.shape.dim.add(size=size)

    return change(index, key, edit)


def table(found: Mapping[bytes, bytes], **forged: int) -> bytes:
    """The bytes of a table with these values, and forged sizes of blocks.

    They are those of `data`, `metadata` and `index`.
    """
    content = bytearray()

    def block(name: str, items: Mapping[bytes, bytes]) -> bytes:
        begin = len(content)
        for key, value in sorted(items.items()):
            for number in (0, len(key), len(value)):
                content.extend(varint(number))
            content.extend(key + value)
        # One entry to restart at, whatever their number.
        content.extend(struct.pack("<II", 0, 1))
        size = len(content) - begin
        content.append(0)
        content.extend(struct.pack("<I", _masked_crc(content[begin:])))
        return varint(begin) + varint(forged.get(name, size))

    data = block("data", found)
    footer = block("metadata", {})
    footer += block("index", {max(found, default=b""): data})
    return bytes(content) + footer.ljust(40, b"\0") + struct.pack("<Q", _MAGIC)


def varint(number: int) -> bytes:
    """A number in groups of seven bits."""
    code = b""
    while number >= 0x80:
        code += bytes([number & 0x7F | 0x80])
        number >>= 7
    return code + bytes([number])


def _masked_crc(content: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def write(prefix: str, tensors: Mapping[str, Any]) -> bytes:
    """Lets TensorFlow write a checkpoint; returns its index."""
    tf.raw_ops.SaveV2(
        prefix=prefix,
        tensor_names=list(tensors),
        shape_and_slices=[""] * len(tensors),
        tensors=[tf.convert_to_tensor(value) for value in tensors.values()],
    )
    with open(f"{prefix}.index", "rb") as file:
        return file.read()
