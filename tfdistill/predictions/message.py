"""One message between peers: a replica's predictions of one batch, signed.

    magic | header | by output: classes | by array: dtype, shape | arrays | MAC

Numbers are little-endian. The MAC is an HMAC-SHA256 by the run's key over all
before it, which names the sender, its incarnation and the step: no message
counts as another one. Without a key it is a digest that anybody can make.
"""

import hashlib
import hmac
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tfdistill.exchange import signing

_MAGIC = b"tfdL1\0"
# Group, replica, step, incarnation, batch, number of outputs and of arrays.
_HEADER = struct.Struct("<6sIIq16s8sBB")
_MAC_BYTES = 32
_DTYPES = tuple(map(np.dtype, ("<f4", "<f2", "<i4")))
_MAX_RANK = 8


class MessageError(ValueError):
    """What arrived is no message of this run."""


class Message(NamedTuple):
    """Predictions of a batch.

    Attributes:
        group: Of the sender.
        replica: Which of the group's replicas has predicted.
        step: The student's step, before its update.
        incarnation: 16 bytes, of the sender's mailbox.
        batch: 8 bytes, a hash of the inputs.
        classes: The size of each output's last axis.
        arrays: What `forms.Form.encode` has kept of the outputs.
    """

    group: int
    replica: int
    step: int
    incarnation: bytes
    batch: bytes
    classes: tuple[int, ...]
    arrays: tuple[np.ndarray, ...]


def encode(message: Message, signer: signing.Signer | None) -> bytes:
    """Returns a message as bytes, signed."""
    parts = [
        _HEADER.pack(
            _MAGIC,
            message.group,
            message.replica,
            message.step,
            message.incarnation,
            message.batch,
            len(message.classes),
            len(message.arrays),
        ),
        struct.pack(f"<{len(message.classes)}I", *message.classes),
    ]
    for array in message.arrays:
        kind = _DTYPES.index(array.dtype)
        parts.append(
            struct.pack(f"<BB{array.ndim}I", kind, array.ndim, *array.shape)
        )
    parts += [array.tobytes() for array in message.arrays]
    body = b"".join(parts)
    return body + proof(body, signer)


def decode(data: bytes, signer: signing.Signer | None) -> Message:
    """Returns the message that bytes hold; MessageError if they hold none.

    Its arrays are views of `data`.
    """
    try:
        head, classes, specs, start = _parsed(data)
    except struct.error:
        raise MessageError("it must be a message; it is cut off") from None
    arrays = []
    for kind, shape in specs:
        dtype = _DTYPES[kind]
        count = int(np.prod(shape, dtype=np.float64))
        end = start + count * dtype.itemsize
        if end > len(data) - _MAC_BYTES:
            raise MessageError(
                f"it must hold what its shapes say; received {len(data)} bytes"
            )
        arrays.append(np.frombuffer(data, dtype, count, start).reshape(shape))
        start = end
    if start != len(data) - _MAC_BYTES:
        raise MessageError(
            f"it must hold what its shapes say; received {len(data)} bytes"
        )
    if not hmac.compare_digest(data[start:], proof(data[:start], signer)):
        raise MessageError(
            "it must be signed with this run's key; its signature is wrong"
        )
    _, group, replica, step, incarnation, batch, *_ = head
    return Message(
        group, replica, step, incarnation, batch, classes, tuple(arrays)
    )


def proof(body: bytes, signer: signing.Signer | None) -> bytes:
    """Returns 32 bytes that only who has the key can make, if there is one."""
    if signer is None:
        return hashlib.sha256(body).digest()
    return bytes.fromhex(signer.proof(b"message of a peer: " + body))


def _parsed(
    data: bytes,
) -> tuple[tuple, tuple[int, ...], list[tuple[int, tuple[int, ...]]], int]:
    """Reads all but the arrays, of which nothing is trusted yet."""
    if data[: len(_MAGIC)] != _MAGIC:
        raise MessageError("it must be a message of tfdistill's peers")
    head = _HEADER.unpack_from(data)
    num_outputs, num_arrays = head[-2:]
    start = _HEADER.size
    classes = struct.unpack_from(f"<{num_outputs}I", data, start)
    start += 4 * num_outputs
    specs = []
    for _ in range(num_arrays):
        kind, rank = struct.unpack_from("<BB", data, start)
        if kind >= len(_DTYPES) or rank > _MAX_RANK:
            raise MessageError(
                f"its arrays must have a known dtype and at most {_MAX_RANK} "
                f"axes; received dtype {kind} and {rank} axes"
            )
        specs.append((kind, struct.unpack_from(f"<{rank}I", data, start + 2)))
        start += 2 + 4 * rank
    return head, classes, specs, start


def refusal(received: Message, own: Message) -> tuple[str, str] | None:
    """Finds why an answer is none to one's own message: kind and reason.

    Peers keep their outputs in the same form, so an answer looks as one's own
    message does.
    """
    if received.classes != own.classes:
        return "classes", (
            f"its outputs must have {_listed(own.classes)} classes, as the "
            f"student's; received {_listed(received.classes)}"
        )
    found, wanted = _specs(received), _specs(own)
    if found != wanted:
        kind = "dtype" if _column(found, 0) != _column(wanted, 0) else "shape"
        return kind, (
            f"its predictions must be {_described(wanted)} for each example, "
            f"as the student's; received {_described(found)}. Use the same "
            "model and the same `form` in all groups"
        )
    if received.batch != own.batch or _rows(received) != _rows(own):
        return "batch", (
            "it must be about the same batch; received one about another. "
            'Shard the data with mode="coordinated", and shuffle and augment '
            "them with the same seeds in all groups"
        )
    sizes = iter(np.repeat(own.classes, len(own.arrays) // len(own.classes)))
    for array, size in zip(received.arrays, sizes, strict=True):
        is_index = array.dtype.kind == "i"
        if is_index and not ((array >= 0) & (array < size)).all():
            return "classes", (
                f"its classes must be from 0 to {size - 1}; received from "
                f"{array.min()} to {array.max()}"
            )
    return None


def has_faults(message: Message) -> bool:
    """Whether any of its values is NaN or infinite."""
    return not all(
        np.isfinite(array).all()
        for array in message.arrays
        if array.dtype.kind == "f"
    )


def _specs(message: Message) -> list[tuple[str, tuple[int, ...]]]:
    return [(a.dtype.name, a.shape[1:]) for a in message.arrays]


def _rows(message: Message) -> list[int]:
    return [len(array) for array in message.arrays]


def _column(specs: list[tuple], index: int) -> list:
    return [spec[index] for spec in specs]


def _described(specs: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    return (
        ", ".join(f"{dtype} {list(shape)}" for dtype, shape in specs)
        or "nothing"
    )


def _listed(classes: Sequence[int]) -> str:
    return " and ".join(map(str, classes))
