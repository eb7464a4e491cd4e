"""One message between peers, read as hostile input."""

import random

import numpy as np
import pytest

from tfdistill.exchange import signing
from tfdistill.predictions import message as message_lib

KEY = signing.Signer(b"0123456789abcdef")
MESSAGE = message_lib.Message(
    1,
    3,
    2**40,
    b"i" * 16,
    b"b" * 8,
    (5, 1),
    (
        np.arange(20, dtype="float32").reshape(4, 5),
        np.ones([4], "float16"),
        np.zeros([4, 2, 3], "int32"),
    ),
)


@pytest.mark.parametrize("signer", [KEY, None])
def test_what_was_sent_arrives(signer):
    found = message_lib.decode(message_lib.encode(MESSAGE, signer), signer)
    assert found[:-1] == MESSAGE[:-1]
    for array, sent in zip(found.arrays, MESSAGE.arrays, strict=True):
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
            with pytest.raises(message_lib.MessageError):
                message_lib.decode(wrong, KEY)


def test_another_key_is_refused_by_name():
    data = message_lib.encode(MESSAGE, signing.Signer(b"another-key-of-a-run"))
    with pytest.raises(
        message_lib.MessageError, match="signed with this run's key"
    ):
        message_lib.decode(data, KEY)
    with pytest.raises(
        message_lib.MessageError, match="signed with this run's key"
    ):
        message_lib.decode(message_lib.encode(MESSAGE, None), KEY)


def test_shapes_that_promise_more_than_there_is_cost_nothing():
    body = message_lib.encode(MESSAGE._replace(arrays=()), None)[:-32]
    spec = b"\x00\x02" + np.array([2**31, 2**31], "<u4").tobytes()
    # One array is announced; the classes come before it.
    head = bytearray(body)
    head[message_lib._HEADER.size - 1] = 1
    body = bytes(head) + spec
    with pytest.raises(message_lib.MessageError, match="message of tfdistill"):
        message_lib.decode(body + message_lib.proof(body, KEY), KEY)
