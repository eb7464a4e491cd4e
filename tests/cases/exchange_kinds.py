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
from tfdistill.exchange import manifest
from tfdistill.exchange import publisher
from tfdistill.mixing import outer_gradients

KEY = b"0123456789abcdef"
_INCARNATION = uuid.UUID(int=7)
# By step: a key frame; deltas of it, of a float, a whole number and a quantized
# kernel with its scale; and a delta over zeros, whose other values are a base.
VALUES = {
    step: {
        "a": np.float32([[0, 1], [2, 3], [4, 5]])
        + np.float32([[0], [step == 2], [step == 3]]) * 0.5,
        "b": np.array(step),
        "kernel": np.int8([[step, -1], [2, -128]]),
        "scales_kernel": np.float32([[0.5, 2.0**-step]]),
    }
    for step in (1, 2, 3)
} | {4: {"a": np.float32([[0, 0.25]])}}
BASE = [b"\x00\x00\x80?", b"\x01"]
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
            (manifest, "installed_versions", {"python": "3"}),
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
            inputs={"x": {"shape": [None, 2], "dtype": "float32"}},
            outputs=[],
            variables={"a": {"shape": (3, 2), "dtype": "float32"}},
            extras={deltas.KEY_EVERY_FIELD: 4},
        )
        encoder = deltas.Encoder(1, VALUES[1])
        for step in (2, 3):
            field, blocks = encoder.encode(VALUES[step])
            exchange.deltas.publish_file(
                blocks, group=0, step=step, extras={deltas.FIELD: field}
            )
        name = bases.name_of(BASE)
        exchange.bases.publish(name, BASE)
        zeros = {"a": np.zeros_like(VALUES[4]["a"])}
        field, blocks = deltas.Encoder(4, zeros).encode(VALUES[4])
        exchange.deltas.publish_file(
            blocks,
            group=0,
            step=4,
            extras={deltas.FIELD: {**field, deltas.BASE: name}},
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

    def delta(step, content, signature, lengths, **more):
        """`lengths`: by variable, rows, those sent, and bytes of the index."""
        entries = {
            name: {
                "of": of,
                "rows": rows,
                "index": index,
                "sha256": hashlib.sha256(VALUES[step][name]).hexdigest(),
            }
            for name, (of, rows, index) in lengths.items()
        }
        field = {**more, "variables": entries}
        add(
            f"deltas/group_0/{step}",
            {"delta.bin": content},
            signature,
            extras={"delta": field},
        )

    add(
        "group_0/1",
        {"saved_model.pb": b"graph", "variables/variables.index": b"index"},
        "f65ee604959dfd33266e266b15d9e90ed277f776d8108cedc1ee6f2aa00d7e36",
        extras={"key_every": 4},
        graph_fingerprint="f",
        inputs={"x": {"shape": [None, 2], "dtype": "float32"}},
        outputs=[],
        variables={"a": {"shape": [3, 2], "dtype": "float32"}},
    )
    all_of_one = b"x\x01k\x00\x00\x00\x81\x00\x81"
    delta(
        2,
        b"x\x01s\x00\x00\x00A\x00A\x00\x00 @\x00\x00`@"
        + all_of_one
        + b"\x02\x00\x00\x00\x00\x00\x00\x00"
        + all_of_one
        + b"\x02\xff"
        + all_of_one
        + b"\x00\x00\x00?\x00\x00\x80>",
        "f3a0bb85de5c7e050c0045ccf9b0c2a3f441509cfae6faa673018e165eac8610",
        {
            "a": (3, 1, 9),
            "b": (1, 1, 9),
            "kernel": (2, 1, 9),
            "scales_kernel": (1, 1, 9),
        },
        frame=1,
    )
    delta(
        3,
        b"x\x01K\x00\x00\x00a\x00a"
        + np.float32([2, 3, 4.5, 5.5]).tobytes()
        + all_of_one
        + b"\x03\x00\x00\x00\x00\x00\x00\x00"
        + all_of_one
        + b"\x03\xff"
        + all_of_one
        + b"\x00\x00\x00?\x00\x00\x00>",
        "28140b405b79302c7a370bd7b7b94099da363bd9b94201009507d9e7f9c12029",
        {
            "a": (3, 2, 9),
            "b": (1, 1, 9),
            "kernel": (2, 1, 9),
            "scales_kernel": (1, 1, 9),
        },
        frame=1,
    )
    base = hashlib.sha256(b"".join(BASE)).hexdigest()
    found[f"bases/{base}"] = b"".join(BASE)
    delta(
        4,
        all_of_one + b"\x00\x00\x00\x00\x00\x00\x80>",
        "54fa25553e33520f706db2ab64802630c3dc6051677a508db95d1e61df0ec7a0",
        {"a": (1, 1, 9)},
        frame=4,
        base=base,
    )
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
