"""Deltas against full copies: by bits, when lost, torn, forged or too old."""

import pathlib
import random

import numpy as np
import pytest

from tests.cases import object_store
from tests.cases import tiers
from tfdistill import contrib
from tfdistill.exchange import claim
from tfdistill.exchange import deltas
from tfdistill.exchange import publisher
from tfdistill.exchange import versions
from tfdistill.exports import quantized

_KEY = b"0123456789abcdef"


def _values(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "table": rng.normal(size=(300, 3)).astype("float32"),
        "kernel": rng.normal(size=(40, 7)).astype("float32"),
        "half": rng.normal(size=50).astype("float16"),
        "scalar": np.array(rng.integers(1000)),
        "flags": rng.integers(0, 2, 11).astype(bool),
        "empty": np.zeros([0, 4], "float32"),
        "fixed": rng.normal(size=(5, 5)),
    }


def _trained(values, rng):
    """The values some steps later: a few rows, and all that is dense."""
    new = {name: value.copy() for name, value in values.items()}
    for row in rng.integers(0, 300, 6):
        new["table"][row] = rng.normal(size=3)
    if rng.random() < 0.3:
        # A bit of a sign, and what equals nothing, not even itself.
        new["table"][rng.integers(300)] = [0.0, -0.0, np.nan]
    new["kernel"] += rng.normal(size=(40, 7)).astype("float32")
    new["half"] += rng.normal(size=50).astype("float16")
    new["scalar"] += 1
    new["flags"][rng.integers(11)] ^= True
    return new


def _written(values, dtype):
    """What a version with this dtype of weights holds, by checkpoint key."""
    if dtype is None:
        return values
    found = {f"model_variables/{name}": v for name, v in values.items()}
    for name, by_row in (("table", True), ("kernel", False)):
        key = f"model_variables/{name}"
        value = np.nan_to_num(found.pop(key))
        form = quantized.Form(key, value.shape, "float32", dtype, by_row)
        parts = form.encode(value)
        found |= {key: part.numpy() for key, part in parts.items()}
    return {key.replace("/", "_"): value for key, value in found.items()}


def _assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (
            value.dtype,
            value.shape,
        )
        assert found[name].tobytes() == value.tobytes(), name


class _Group:
    """Publishes values, each `key_every`-th time whole; and reads them."""

    def __init__(self, exchange, key_every=10):
        self.exchange, self._key_every = exchange, key_every
        self.step, self.encoder = 0, None

    def publish(self, values):
        self.step += 1
        encoder = self.encoder
        if encoder is None or encoder.num_deltas == self._key_every - 1:
            self.encoder = deltas.Encoder(self.step, values)
            return self.exchange.publish(
                lambda directory: np.savez(f"{directory}/values.npz", **values),
                group=0,
                step=self.step,
            )
        field, blocks = encoder.encode(values)
        return self.exchange.deltas.publish_file(
            blocks, group=0, step=self.step, extras={deltas.FIELD: field}
        )


def _read(exchange, version, held=None):
    """Reads a version, from what is held if it is a delta."""
    if not deltas.is_delta(version.manifest):
        with exchange.readable(version) as whole:
            with np.load(f"{whole.path}/values.npz") as found:
                return dict(found)
    with exchange.deltas.readable(version) as delta:
        field = delta.manifest.extras[deltas.FIELD]
        return deltas.patched(field, delta.content, held)


@pytest.mark.parametrize(
    "dtype", ["int8", tiers.deep(None), tiers.deep("int4")]
)
def test_200_versions_are_those_of_full_reads_for_readers_that_miss_some(
    tmp_path, dtype
):
    """One hears all of them, one half, one joins each time at the frame."""
    exchange = publisher.Exchange(tmp_path, key=_KEY, min_keep_secs=0.0)
    group, trained = _Group(exchange), _values()
    rng = np.random.default_rng(1)
    readers, num_deltas, frame = [{}, {}], 0, {}
    for _ in range(200):
        trained = _trained(trained, rng)
        values = _written(trained, dtype)
        version = group.publish(values)
        is_delta = deltas.is_delta(version.manifest)
        num_deltas += is_delta
        frame = frame if is_delta else values
        for index, held in enumerate(readers):
            if not is_delta or index == 0 or rng.random() < 0.5:
                readers[index] = found = _read(exchange, version, held)
                _assert_same_bits(found, values)
        _assert_same_bits(
            _read(exchange, version, frame) if is_delta else frame, values
        )
    assert num_deltas == 180
    assert exchange.steps(0) == [171, 181, 191]


# ---- deltas that are lost, torn, forged, or of another frame ----


def _delta(encoder_values, new):
    encoder = deltas.Encoder(1, encoder_values)
    field, blocks = encoder.encode(new)
    return field, b"".join(blocks)


def test_a_wrong_delta_or_a_wrong_base_never_gives_a_wrong_result():
    old = _values()
    new = _trained(old, np.random.default_rng(3))
    field, content = _delta(old, new)
    _assert_same_bits(deltas.patched(field, content, old), new)
    other = {**old, "fixed": np.nextafter(old["fixed"], 1)}
    with pytest.raises(deltas.DeltaError, match="fixed is invalid: the result"):
        deltas.patched(field, content, other)
    rng = random.Random(0)
    for _ in range(300):
        torn = bytearray(content)
        if rng.random() < 0.5:
            torn[rng.randrange(len(torn))] ^= 1 << rng.randrange(8)
        else:
            del torn[rng.randrange(len(torn)) :]
        try:
            found = deltas.patched(field, bytes(torn), old)
        except deltas.DeltaError:
            continue
        # Such as a bit of an index that stands for no row.
        _assert_same_bits(found, new)


@pytest.mark.parametrize("name", ["table", "empty", "scalar"])
def test_a_forged_entry_is_refused_and_costs_nothing(name):
    old = _values()
    field, content = _delta(old, _trained(old, np.random.default_rng(0)))
    entries = field["variables"]
    forged = [
        {**entries, name: {**entries[name], key: value}}
        for key, values in {
            "of": (10**15, True),
            "rows": (2**62, -1),
            "index": (2**62, 1.0),
            "sha256": ("0" * 64, None),
        }.items()
        for value in values
    ]
    for wrong in (*forged, {**entries, name: None}, [], None):
        with pytest.raises(deltas.DeltaError):
            deltas.patched({**field, "variables": wrong}, content, old)


def test_a_torn_delta_is_corrupt_and_a_key_must_sign_it(tmp_path):
    exchange = publisher.Exchange(tmp_path, key=_KEY)
    group, values = _Group(exchange), _values()
    group.publish(values)
    version = group.publish(_trained(values, np.random.default_rng(0)))
    # No reader of versions sees it.
    assert exchange.steps(0) == [1] and exchange.latest(0).step == 1
    stranger = publisher.Exchange(tmp_path, key=b"fedcba9876543210")
    with pytest.raises(versions.CorruptVersionError, match="trusted"):
        stranger.deltas.open(0, 2)
    path = pathlib.Path(version.path, deltas.FILE_NAME)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(versions.CorruptVersionError, match="SHA-256"):
        _read(exchange, exchange.deltas.latest(0), values)
    path.write_bytes(path.read_bytes() + b"?")
    with pytest.raises(versions.CorruptVersionError, match="has more"):
        _read(exchange, exchange.deltas.latest(0), values)


# ---- how long they stay ----


def test_a_delta_dies_with_its_frame_and_after_newer_ones(tmp_path):
    now = [0.0]
    exchange = publisher.Exchange(
        tmp_path, max_to_keep=2, min_keep_secs=2.5, clock=lambda: now[0]
    )
    group, values, frames = _Group(exchange, key_every=3), _values(), {}
    for number in range(40):
        version = group.publish(values)
        frames[version.step] = deltas.frame_of(version.manifest)
        now[0] += 1.0 if number < 20 else 0.0
        alive, kept = exchange.steps(0), exchange.deltas.listed(0)
        assert {frames[step] for step in kept} <= {*alive}
        assert kept[-2:] == [s for s in frames if frames[s]][-2:]
        assert len(kept) <= 4 or number >= 20
    # Not even if nothing that is newer has come.
    group = _Group(exchange, key_every=1)
    group.step, now[0] = 100, 10.0
    for _ in range(4):
        now[0] += 10.0
        group.publish(values)
    assert exchange.steps(0) == [103, 104]
    assert exchange.deltas.listed(0) == []


def test_a_publisher_that_lost_its_group_publishes_no_delta(tmp_path):
    exchange = publisher.Exchange(tmp_path)
    group, values = _Group(exchange), _values()
    exchange.claim(0, run="a")
    group.publish(values)
    publisher.Exchange(tmp_path).claim(0, run="a")
    with pytest.raises(claim.ClaimLostError):
        group.publish(values)
    assert exchange.deltas.listed(0) == []


@pytest.mark.parametrize("kind", ["no_rename", tiers.deep("s3")])
def test_deltas_where_directories_are_not_renamed(kind, tmp_path):
    with object_store.exchange(kind, tmp_path) as exchange:
        group, values, held = _Group(exchange, key_every=3), _values(), None
        rng = np.random.default_rng(0)
        for step in range(1, 6):
            values = _trained(values, rng)
            place = exchange.deltas if step % 3 != 1 else exchange
            group.publish(values)
            held = _read(exchange, place.latest(0), held)
            _assert_same_bits(held, values)
        assert exchange.steps(0) == [1, 4]
        assert exchange.deltas.steps(0) == [2, 3, 5]


# ---- choosers ----


@pytest.mark.parametrize(
    "choose",
    [
        None,
        contrib.TopOfChunks(chunk=8, low_pass=0.25),
        contrib.LocalMaximum(bin_size=16),
    ],
    ids=["exact", "top_of_chunks", "local_maximum"],
)
def test_what_was_sent_and_the_residue_are_the_change(choose):
    """Whole numbers, so that sums are exact; also what readers then hold."""
    rng = np.random.default_rng(0)
    first = {"kernel": np.zeros([20, 9], "float32"), "table": np.ones([50, 2])}
    encoder = deltas.Encoder(0, first, choose=choose, chosen=["kernel"])
    held, now, offered = first, first, []
    sent = np.zeros([20, 9])
    for _ in range(30):
        change = rng.integers(-9, 10, (20, 9)) * (rng.random((20, 9)) < 0.5)
        now = {
            "kernel": now["kernel"] + change.astype("float32"),
            "table": now["table"] + (rng.random((50, 1)) < 0.1),
        }
        field, blocks = encoder.encode(now)
        offered.append(field["variables"]["kernel"]["rows"])
        new = deltas.patched(field, b"".join(blocks), held)
        sent += new["kernel"] - held["kernel"]
        held = new
        np.testing.assert_array_equal(held["table"], now["table"])
    residue = now["kernel"] - held["kernel"]
    np.testing.assert_array_equal(sent + residue, now["kernel"])
    if choose is None:
        assert not residue.any()
        return
    # Few at first, and none is held back for good.
    assert offered[0] < 180 / 3 and np.abs(residue).max() < 90
    for _ in range(60):
        field, blocks = encoder.encode(now)
    held = deltas.patched(field, b"".join(blocks), first)
    _assert_same_bits(held, now)


def test_choosers_against_their_formulas():
    rng = np.random.default_rng(0)
    change, residue = rng.normal(size=(2, 37)).astype("float32")
    found = contrib.TopOfChunks(chunk=5, low_pass=0.3)(change, residue)
    score = np.abs(change + np.float32(0.3) * residue)
    expected = [
        start + np.argmax(score[start : start + 5]) for start in range(0, 37, 5)
    ]
    assert found.tolist() == expected
    found = contrib.LocalMaximum(bin_size=10)(change, residue)
    expected = [
        index
        for index in range(37)
        if abs(residue[index] + 2 * change[index])
        >= max(np.abs(residue + change)[index // 10 * 10 :][:10])
    ]
    assert found.tolist() == expected
    for chooser in (contrib.TopOfChunks(), contrib.LocalMaximum()):
        assert not chooser(np.zeros(70), np.zeros(70)).size
