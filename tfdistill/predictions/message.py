"""One message between peers: a replica's predictions of one batch, signed.

    magic | header | by output: classes | arrays: dtype, shape, values | MAC

Numbers are little-endian. The MAC is an HMAC-SHA256 by the run's key over all
before it, which names the sender, its incarnation and the step: no message
counts as another one. Without a key it is a digest that anybody can make.
"""

import hashlib
import hmac
import math
import struct
from typing import NamedTuple

import numpy as np

from tfdistill.exchange import signing

_MAGIC = b"tfdL2\0"
# Group, replica, step, incarnation, batch, number of outputs and of arrays.
_HEADER = struct.Struct("<6sIIq16s8sBB")
_MAC_BYTES = 32
_DTYPES = tuple(map(np.dtype, ("<f4", "<f2", "<i4")))


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
        parts += [
            struct.pack(f"<BB{array.ndim}I", kind, array.ndim, *array.shape),
            array.tobytes(),
        ]
    body = b"".join(parts)
    return body + proof(body, signer)


def decode(data: bytes, signer: signing.Signer | None) -> Message:
    """Returns the message that bytes hold; MessageError if they hold none.

    Its arrays are views of `data`.
    """
    body, mac = data[:-_MAC_BYTES], data[-_MAC_BYTES:]
    if not hmac.compare_digest(mac, proof(body, signer)):
        raise MessageError(
            "it must be whole, and signed with this run's key; its signature "
            "is wrong"
        )
    try:
        return _parsed(body)
    except (struct.error, ValueError, IndexError, OverflowError) as error:
        raise MessageError(
            f"it must be a message of tfdistill's peers: {error}"
        ) from error


def proof(body: bytes, signer: signing.Signer | None) -> bytes:
    """Returns 32 bytes that only who has the key can make, if there is one."""
    if signer is None:
        return hashlib.sha256(body).digest()
    return bytes.fromhex(signer.proof(b"message of a peer: " + body))


def _parsed(body: bytes) -> Message:
    magic, *named, num_outputs, num_arrays = _HEADER.unpack_from(body)
    group, replica, step, incarnation, batch = named
    if magic != _MAGIC:
        raise ValueError("it begins in another way")
    start = _HEADER.size
    classes = struct.unpack_from(f"<{num_outputs}I", body, start)
    start += 4 * num_outputs
    arrays = []
    for _ in range(num_arrays):
        kind, rank = struct.unpack_from("<BB", body, start)
        shape = struct.unpack_from(f"<{rank}I", body, start + 2)
        start += 2 + 4 * rank
        flat = np.frombuffer(body, _DTYPES[kind], math.prod(shape), start)
        arrays.append(flat.reshape(shape))
        start += flat.nbytes
    if start != len(body):
        raise ValueError("it holds more than its arrays")
    return Message(
        group, replica, step, incarnation, batch, classes, tuple(arrays)
    )


def refusal(received: Message, own: Message) -> tuple[str, str] | None:
    """Finds why an answer is none to one's own message: kind and reason.

    Peers keep their outputs in the same form, so an answer looks as one's own
    message does.
    """
    if received.classes != own.classes:
        return "classes", (
            f"its outputs must have {own.classes} classes, as the student's; "
            f"received {received.classes}"
        )
    found, wanted = _specs(received), _specs(own)
    if found != wanted:
        return "shape", (
            f"its predictions must be {wanted} for each example, as the "
            f"student's; received {found}. Use the same model and the same "
            "`encoding` in all groups"
        )
    if received.batch != own.batch or _rows(received) != _rows(own):
        return "batch", (
            "it must be about the same batch; received one about another. "
            'Shard the data with mode="coordinated", and shuffle and augment '
            "them with the same seeds in all groups"
        )
    sizes = np.repeat(own.classes, len(own.arrays) // len(own.classes))
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


def _specs(message: Message) -> str:
    return " and ".join(
        f"{a.dtype.name} {list(a.shape[1:])}" for a in message.arrays
    )


def _rows(message: Message) -> list[int]:
    return [len(array) for array in message.arrays]
