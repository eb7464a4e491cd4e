"""An exchange with each kind of directory and file, published or by hand.

`files` holds what was written before the stores had one class: it must still be
read, and the same is written today.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import socket
import struct
import time
import unittest.mock
import uuid

import numpy as np

from tfdistill.exchange import bases
from tfdistill.exchange import deltas
from tfdistill.exchange import publisher
from tfdistill.mixing import outer_gradients
from tfdistill.system import extras

KEY = b"0123456789abcdef"
_INCARNATION = uuid.UUID(int=7)
TABLE, COUNT, KERNEL = (f"model_variables/{index}" for index in range(3))
SCALE = "scales/2"
# A student's, as its manifest has them.
STUDENT = {
    TABLE: {"shape": [3, 2], "dtype": "float32"},
    COUNT: {"shape": [], "dtype": "int64"},
    KERNEL: {"shape": [2, 2], "dtype": "float32"},
}
# Of its quantized versions.
_STORED = {
    **STUDENT,
    KERNEL: {"shape": [2, 2], "dtype": "int8"},
    SCALE: {"shape": [1, 2], "dtype": "float32"},
}
# By step: a key frame, two deltas of it, and one over zeros, with a base.
VALUES = {
    step: {
        TABLE: np.float32([[0, 1], [2, 3], [4, 5]])
        + np.float32([[0], [step == 2], [step == 3]]) * 0.5,
        COUNT: np.array(step),
        KERNEL: np.int8([[step, -1], [2, -128]]),
        SCALE: np.float32([[0.5, 2.0**-step]]),
    }
    for step in (1, 2, 3, 4)
}
_FROZEN = (KERNEL, SCALE)
BASE = [VALUES[4][key].tobytes() for key in _FROZEN]
GRADIENTS = [np.float32([0, 1, -2]), np.float32([])]


@contextlib.contextmanager
def _same_process_and_time():
    patches = [
        unittest.mock.patch.object(owner, name, lambda found=found: found)
        for owner, name, found in (
            (time, "time", 1000.0),
            (uuid, "uuid4", _INCARNATION),
            (os, "getpid", 42),
            (socket, "gethostname", "host"),
            (extras, "installed_versions", {"python": "3"}),
        )
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def publish(root):
    """Publishes all of it."""
    with _same_process_and_time():
        exchange = publisher.Exchange(root, key=KEY)
        exchange.claim(0, run="run")
        exchange.notes(0).write("worker_0", {"address": "host:1"})
        exchange.publish(
            _write_graph,
            group=0,
            step=1,
            graph_fingerprint="f",
            inputs={"x": {"shape": (None, 2), "dtype": "float32"}},
            outputs=[],
            variables=_STORED,
            extras={deltas.KEY_EVERY_FIELD: 4},
        )
        exchange.bases.publish(bases.name_of(BASE), BASE)
        encoder, more = deltas.Encoder(1, VALUES[1]), {}
        for step in (2, 3, 4):
            values = VALUES[step]
            if step == 4:
                values = {key: values[key] for key in (TABLE, COUNT)}
                zeros = {key: np.zeros_like(v) for key, v in values.items()}
                encoder = deltas.Encoder(4, zeros)
                more = {deltas.BASE: bases.name_of(BASE)}
            field, blocks = encoder.encode(values)
            exchange.deltas.publish_file(
                blocks,
                group=0,
                step=step,
                variables=_STORED,
                extras={deltas.FIELD: {**field, **more}},
            )
        for step, bits in ((2, 8), (4, 1)):
            exchange.outer_gradients.publish_file(
                outer_gradients.encode(GRADIENTS, _last_two, bits=bits),
                group=1,
                step=step,
                extras={"anchor": "c"},
            )


def _write_graph(directory):
    pathlib.Path(directory, "variables").mkdir()
    pathlib.Path(directory, "saved_model.pb").write_bytes(b"graph")
    pathlib.Path(directory, "variables/variables.index").write_bytes(b"index")


def _last_two(change, residue):
    return [1, 2]


def files():
    """Returns the bytes of each file by its path below the root."""
    found = {}

    def add(path, contents, signature, **fields):
        group, step = path.rsplit("group_", 1)[1].split("/")
        fields = {
            "created": 1000.0,
            "format": 1,
            "graph_fingerprint": "",
            "group": int(group),
            "incarnation": _INCARNATION.hex,
            "inputs": None,
            "libraries": {"python": "3"},
            "outputs": None,
            "step": int(step),
            "variables": {},
            **fields,
        }
        fields["extras"] = {
            **fields["extras"],
            "signature": f"hmac-sha256:{signature}",
        }
        fields["files"] = {
            name: {
                "size": len(content),
                "sha256": hashlib.sha256(content).hexdigest(),
            }
            for name, content in contents.items()
        }
        text = json.dumps(fields, sort_keys=True, indent=1) + "\n"
        found[f"{path}/manifest.json"] = text.encode()
        for name, content in contents.items():
            found[f"{path}/{name}"] = content

    def delta(step, content, signature, num_sent, **more):
        """`num_sent` has the rows that are sent, by variable."""
        entries = {
            name: {
                "of": len(VALUES[step][name]) if VALUES[step][name].ndim else 1,
                "rows": rows,
                "index": 9,
                "sha256": hashlib.sha256(VALUES[step][name]).hexdigest(),
            }
            for name, rows in num_sent.items()
        }
        add(
            f"deltas/group_0/{step}",
            {"delta.bin": content},
            signature,
            extras={"delta": {**more, "variables": entries}},
            variables=_STORED,
        )

    add(
        "group_0/1",
        {"saved_model.pb": b"graph", "variables/variables.index": b"index"},
        "463cdf2f4b949c2c5dc2575eb5e2c31c46635d1490a442cc1f7fe8cd251adf5b",
        extras={"key_every": 4},
        graph_fingerprint="f",
        inputs={"x": {"shape": [None, 2], "dtype": "float32"}},
        outputs=[],
        variables=_STORED,
    )
    first = b"x\x01k\x00\x00\x00\x81\x00\x81"
    delta(
        2,
        b"x\x01s\x00\x00\x00A\x00A\x00\x00 @\x00\x00`@"
        + first
        + b"\x02\x00\x00\x00\x00\x00\x00\x00"
        + first
        + b"\x02\xff"
        + first
        + b"\x00\x00\x00?\x00\x00\x80>",
        "abc09c2ddfc81139a15d89407a40b68276d39b31f1f6b549b6814b5b81fe560a",
        {TABLE: 1, COUNT: 1, KERNEL: 1, SCALE: 1},
        frame=1,
    )
    delta(
        3,
        b"x\x01K\x00\x00\x00a\x00a"
        + np.float32([2, 3, 4.5, 5.5]).tobytes()
        + first
        + b"\x03\x00\x00\x00\x00\x00\x00\x00"
        + first
        + b"\x03\xff"
        + first
        + b"\x00\x00\x00?\x00\x00\x00>",
        "b767e63ebd24baa2dc5859f9c3d983cd0643b1ac719f4722cd91d635072fbfa9",
        {TABLE: 2, COUNT: 1, KERNEL: 1, SCALE: 1},
        frame=1,
    )
    delta(
        4,
        b"x\x01{\x00\x00\x00\xe1\x00\xe1"
        + np.float32([0, 1, 2, 3, 4, 5]).tobytes()
        + first
        + b"\x04\x00\x00\x00\x00\x00\x00\x00",
        "0779421b5dd7cf34fe95239a5e327981e4ac967f2be2540c809b58a0218a971e",
        {TABLE: 3, COUNT: 1},
        frame=4,
        base="0987b6f7e7eb43244783ff78732cc902e640435d1ef8c526b791159213e1166a",
    )
    found[
        "bases/0987b6f7e7eb43244783ff78732cc902e640435d1ef8c526b791159213e1166a"
    ] = b"\x04\xff\x02\x80\x00\x00\x00?\x00\x00\x80="
    index = b"x\x9cK\x00\x00\x00a\x00a"
    for step, bits, numbers, signature in (
        (
            2,
            8,
            b"\x04\x02\x81<@\x81",
            "8476fd2d61e068758ee6c32deb4e34acc8968c7da47ed2f45e72308feb468dc3",
        ),
        (
            4,
            1,
            b"\x00\x00\xc0?\x80",
            "0cfd7c3d9851dd098bffef4a99aafcd88af0bf4fc454fb2cb67bb39685edc489",
        ),
    ):
        content = struct.pack("<III", 9, 2, bits) + index + numbers
        content += struct.pack("<III", 0, 0, bits)
        add(
            f"outer_gradients/group_1/{step}",
            {"outer_gradient.bin": content},
            signature,
            extras={"anchor": "c"},
        )
    owner = (
        f'"run": "run", "incarnation": "{_INCARNATION.hex}", "host": "host", '
        '"pid": 42'
    )
    for name, fields, signature in (
        (
            "owner",
            owner,
            "790a87ed0840bedc961f655dceec81c178e7a777f67ac081282cc5aa211387e2",
        ),
        (
            "worker_0",
            '"address": "host:1"',
            "55c35ea47137c839a80dd1f7745b9074b134bc713b78e6b886cb6c3c745ce778",
        ),
    ):
        text = f'{{"fields": {{{fields}}}, "signature": "{signature}"}}\n'
        found[f"group_0/{name}.json"] = text.encode()
    return found
