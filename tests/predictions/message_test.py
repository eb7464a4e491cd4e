"""One message between peers, read as hostile input."""

import random

import numpy as np
import pytest

from tfdistill.exchange import signing
from tfdistill.predictions import message as message_lib
from tfdistill.system import untrusted

KEY = signing.Signer(b"0123456789abcdef")
CLASSES = (5, 1)
ARRAYS = (
    np.arange(20, dtype="float32").reshape(4, 5),
    np.ones([4], "float16"),
    np.zeros([4, 2, 3], "int32"),
    np.zeros([4, 1], "float32"),
)
MESSAGE = message_lib.Message(
    1,
    3,
    2**40,
    b"i" * 16,
    b"b" * 8,
    message_lib.layout(CLASSES, ARRAYS),
    b"".join(ARRAYS),
)


@pytest.mark.parametrize("signer", [KEY, None])
def test_what_was_sent_arrives(signer):
    found = message_lib.decode(message_lib.encode(MESSAGE, signer), signer)
    assert found == MESSAGE
    own = message_lib.Own(MESSAGE, CLASSES, ARRAYS)
    arrays = message_lib.answer(found, own)
    for array, sent in zip(arrays, ARRAYS, strict=True):
        assert array.dtype == sent.dtype
        np.testing.assert_array_equal(array, sent)


def test_no_byte_can_change_and_none_be_missing():
    data = message_lib.encode(MESSAGE, KEY)
    dice = random.Random(3)
    for _ in range(2000):
        place = dice.randrange(len(data))
        changed = bytearray(data)
        changed[place] ^= dice.randrange(1, 256)
        cut = data[:place]
        longer = data + data[:place] + b"x"
        for wrong in (bytes(changed), cut, longer):
            with pytest.raises(untrusted.BadMessageError):
                message_lib.decode(wrong, KEY)


def test_a_layout_that_promises_more_than_there_is_is_refused():
    body = bytearray(message_lib.encode(MESSAGE, None)[:-32])
    body[message_lib._HEADER.size - 1] = 0xFF
    whole = bytes(body) + message_lib.proof(bytes(body), KEY)
    with pytest.raises(untrusted.BadMessageError, match="message of tfdistill"):
        message_lib.decode(whole, KEY)
