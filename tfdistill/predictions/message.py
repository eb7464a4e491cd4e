"""One message between peers: a replica's predictions of one batch, signed.

    magic | header | layout | values of the arrays | MAC

Numbers are little-endian. The layout is a text that says the classes, dtypes
and shapes. Peers keep their outputs in the same form, so the reader of a
message compares this text with its own, and makes arrays by its own shapes: no
size is taken from another process. The MAC is an HMAC-SHA256 by the run's key
of a digest of all before it, which names the sender, its incarnation and the
step: no message can pass for another message. Without a key it is this digest,
which any process can make.
"""

import hashlib
import hmac
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tfdistill.exchange import signing
from tfdistill.system import untrusted

_MAGIC = b"tfdL3\0"
# Group, replica, step, incarnation, batch, and the bytes of the layout.
_HEADER = struct.Struct("<6sIIq16s8sH")
_MAC_BYTES = 32


class Message(NamedTuple):
    """Predictions of a batch.

    Attributes:
        group: Group of the sender.
        replica: Which of the group's replicas has predicted.
        step: The student's step, before its update.
        incarnation: 16 bytes, of the sender's mailbox.
        batch: 8 bytes, a hash of the inputs.
        layout: What the values are, without the number of rows.
        values: The bytes of all arrays, one after the other.
    """

    group: int
    replica: int
    step: int
    incarnation: bytes
    batch: bytes
    layout: str
    values: bytes | memoryview


class Own(NamedTuple):
    """A message to send, and what it was made of: see `layout`."""

    message: Message
    classes: Sequence[int]
    arrays: Sequence[np.ndarray]


def own(
    sender: tuple[int, int, int, bytes],
    batch: bytes,
    classes: Sequence[int],
    arrays: Sequence[np.ndarray],
) -> Own:
    """Returns a message; the `sender` is all that comes before its batch."""
    values = b"".join(array.data for array in arrays)
    message = Message(*sender, batch, layout(classes, arrays), values)
    return Own(message, classes, arrays)


def layout(classes: Sequence[int], arrays: Sequence[np.ndarray]) -> str:
    """Describes what `forms.Form.encode` has kept of outputs.

    `classes` has the size of each output's last axis.
    """
    kept = " and ".join(f"{a.dtype.name} {list(a.shape[1:])}" for a in arrays)
    return f"{kept} of {list(classes)} classes"


def encode(message: Message, signer: signing.Signer | None) -> bytes:
    """Returns a message as bytes, signed."""
    *named, text, values = message
    described = text.encode()
    header = _HEADER.pack(_MAGIC, *named, len(described))
    body = b"".join((header, described, values))
    return body + proof(body, signer)


def decode(data: bytes, signer: signing.Signer | None) -> Message:
    """Returns the message that bytes hold; BadMessageError if they hold none.

    Its values are a view of `data`.
    """
    body, mac = memoryview(data)[:-_MAC_BYTES], data[-_MAC_BYTES:]
    if not hmac.compare_digest(mac, proof(body, signer)):
        raise untrusted.BadMessageError(
            "forged",
            "it must be whole, and signed with this run's key; its signature "
            "is wrong",
        )
    try:
        magic, *named, size = _HEADER.unpack_from(body)
        end = _HEADER.size + size
        if magic != _MAGIC or end > len(body):
            raise ValueError("it doesn't begin as a message does")
        described = str(body[_HEADER.size : end], "utf-8")
        return Message._make([*named, described, body[end:]])
    except (struct.error, ValueError) as error:
        raise untrusted.BadMessageError(
            "forged", f"it must be a message of tfdistill's peers: {error}"
        ) from error


def proof(body: bytes | memoryview, signer: signing.Signer | None) -> bytes:
    """Returns 32 bytes that, with a key, only an owner of the key can make."""
    # Signed is the digest, so that a large body is not copied.
    digest = hashlib.sha256(body).digest()
    if signer is None:
        return digest
    return bytes.fromhex(signer.proof(b"message of a peer: " + digest))


def answer(received: Message, own: Own) -> tuple[np.ndarray, ...]:
    """Returns the arrays of a message about the same batch as this task's own.

    BadMessageError if the message doesn't fit.
    """
    ours = own.message
    if received.layout != ours.layout:
        raise untrusted.BadMessageError(
            "shape",
            f"its predictions must have the student's layout, {ours.layout}; "
            f"received {received.layout[:200]}. Use the same model and the "
            "same `encoding` in all groups",
        )
    if received.batch != ours.batch or len(received.values) != len(ours.values):
        raise untrusted.BadMessageError(
            "batch",
            "it must be about the same batch, but is about another batch. "
            'Shard the data with mode="coordinated", and shuffle and augment '
            "them with the same seeds in all groups",
        )
    arrays, start = [], 0
    for array in own.arrays:
        flat = np.frombuffer(received.values, array.dtype, array.size, start)
        arrays.append(flat.reshape(array.shape))
        start += array.nbytes
    sizes = np.repeat(own.classes, len(arrays) // len(own.classes))
    for array, size in zip(arrays, sizes, strict=True):
        is_index = array.dtype.kind == "i"
        if is_index and not ((array >= 0) & (array < size)).all():
            raise untrusted.BadMessageError(
                "classes",
                f"its classes must be from 0 to {size - 1}; received from "
                f"{array.min()} to {array.max()}",
            )
    return tuple(arrays)


def has_faults(arrays: Sequence[np.ndarray]) -> bool:
    """Whether any of the values is NaN or infinite."""
    return not all(
        np.isfinite(array).all() for array in arrays if array.dtype.kind == "f"
    )
