"""What was written before is still read, and what is written is the same."""

import numpy as np
import pytest

from tests.cases import exchange_kinds as kinds
from tfdistill.exchange import claim
from tfdistill.exchange import deltas
from tfdistill.exchange import publisher
from tfdistill.exchange import versions
from tfdistill.exports import quantized
from tfdistill.follow import reading
from tfdistill.mixing import outer_gradients


def _contents(root):
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def test_each_kind_is_written_as_before_byte_for_byte(tmp_path):
    kinds.publish(tmp_path)
    found, expected = _contents(tmp_path), kinds.files()
    assert [*found] == sorted(expected)
    for path, content in expected.items():
        assert found[path] == content, path


@pytest.fixture
def exchange(tmp_path):
    for name, content in kinds.files().items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return publisher.Exchange(tmp_path, key=kinds.KEY)


def _content(store, step, group=0):
    with store.readable(store.open(group, step)) as version:
        return version.manifest.extras, version.content


def test_whole_versions_of_before_are_read(exchange):
    version = exchange.latest(0)
    exchange.verify(version)
    assert (version.step, version.num_bytes) == (1, 10)
    assert deltas.frame_of(version.manifest) == 1
    assert exchange.steps(0) == [1] and exchange.steps(1) == []


class _Place:
    """What holds the key frame, which it need not read."""

    held = (
        kinds.VALUES[1][kinds.TABLE],
        kinds.VALUES[1][kinds.COUNT],
        quantized.Quantized(
            *(kinds.VALUES[1][key] for key in (kinds.KERNEL, kinds.SCALE)),
            [2, 2],
            "float32",
        ),
    )


@pytest.mark.parametrize("step", [2, 3, 4])
def test_deltas_and_bases_of_before_are_read(exchange, step):
    assert exchange.deltas.steps(0) == [2, 3, 4]
    reader = reading.Reader(exchange, kinds.STUDENT, pytest.fail)
    delta = exchange.deltas.latest(0, wanted=lambda found: found.step == step)
    with exchange.deltas.readable(delta) as readable:
        table, count, kernel = reader.read(readable, _Place, frames={1})
    found = table, count, kernel.stored, kernel.scale
    for ours, theirs in zip(found, kinds.VALUES[step].values(), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


def test_outer_gradients_of_before_are_read(exchange):
    for step, numbers in ((2, [0, 1.007874, -2]), (4, [0, 1.5, -1.5])):
        _, content = _content(exchange.outer_gradients, step, group=1)
        found, empty = outer_gradients.decode(content, [3, 0])
        np.testing.assert_allclose(found, numbers, rtol=1e-6)
        assert not empty.size


def test_notes_and_claims_of_before_are_read(exchange):
    assert exchange.notes(0).read("worker_0") == {"address": "host:1"}
    with pytest.raises(claim.GroupClaimedError, match="process 42 on host"):
        publisher.Exchange(exchange.root, key=kinds.KEY).claim(0, run="b")
    assert exchange.claim(0, run="run").is_held


def test_another_key_trusts_nothing_of_before(exchange):
    other = publisher.Exchange(exchange.root, key=b"fedcba9876543210")
    assert other.notes(0).read("worker_0") == {}
    for store, group in (
        (other, 0),
        (other.deltas, 0),
        (other.outer_gradients, 1),
    ):
        (step, *_) = store.steps(group)
        with pytest.raises(versions.CorruptVersionError, match="trusted"):
            store.open(group, step)
