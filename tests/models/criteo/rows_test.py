"""Tests of rows of a click log as numbers."""

import itertools

import numpy as np
import pyarrow as pa

from models.criteo import rows as criteo_rows


def batch(integers, texts=None, labels=None):
    """Rows with these first integers, and these texts in all categories."""
    texts = texts or [b""] * len(integers)
    columns = [
        labels or [True] * len(integers),
        *([integers] * criteo_rows.NUM_INTEGERS),
        *([texts] * criteo_rows.NUM_CATEGORIES),
    ]
    kinds = criteo_rows.SCHEMA.types
    return pa.RecordBatch.from_arrays(
        [pa.array(c, kind) for c, kind in zip(columns, kinds, strict=True)],
        schema=criteo_rows.SCHEMA,
    )


def prints(*texts):
    """The fingerprints of texts, each in all 26 columns."""
    found = criteo_rows.records(batch([0] * len(texts), list(texts)))
    return found[:, criteo_rows.FIRST_CATEGORY :].view(np.uint32)


def test_labels_and_logarithms():
    values = [0, 5, -2, None, 10**18]
    found = criteo_rows.records(
        batch(values, labels=[True, False, True, True, False])
    )
    assert found.dtype == np.int32 and found.shape == (5, 40)
    floats = found[:, :14].copy().view(np.float32)
    assert floats[:, 0].tolist() == [1, 0, 1, 1, 0]
    expected = [0, np.log(6), -np.log(3), np.nan, np.log1p(1e18)]
    for column in range(1, 14):
        np.testing.assert_allclose(floats[:, column], expected, rtol=1e-6)
    assert not found[:, 14:].any()


def test_a_part_of_a_batch_has_its_own_values():
    whole = batch(list(range(9)), [f"{n}".encode() for n in range(9)])
    np.testing.assert_array_equal(
        criteo_rows.records(whole.slice(4, 3)), criteo_rows.records(whole)[4:7]
    )


def mixed(word):
    """One step of splitmix64, in Python's own integers."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return word ^ word >> 31


def plain_fingerprint(column, text):
    if not text:
        return 0
    words = [
        int.from_bytes(text[n : n + 8], "little")
        for n in range(0, len(text), 8)
    ]
    value = words[0] ^ mixed(column + 1)
    value = mixed((value + len(text) * 0x9E3779B97F4A7C15) % 2**64)
    for word in words[1:]:
        value = mixed(value ^ word)
    return max(1, value >> 32)


def test_fingerprints_stay_as_they_are():
    # Converted files and trained models rely on them: another hash needs a new
    # version of the converted form.
    texts = ["", "00000001", "a", "aa", "a\0", "\0", "\0\0", "ä"]
    texts += ["abcdefgh", "abcdefg", "abcdefgh\0", "abcdefghi", "ibcdefgha"]
    texts += ["x" * n for n in (15, 16, 17, 31, 32, 33, 500)]
    texts += ["x" * 16 + "y" * 8 + "z" * 8, "x" * 16 + "z" * 8 + "y" * 8]
    all_found = prints(*map(str.encode, texts))
    for text, found in zip(texts, all_found, strict=True):
        expected = [plain_fingerprint(n, text.encode()) for n in range(26)]
        assert found.tolist() == expected
    # However little they differ.
    assert len(np.unique(all_found[1:, [0, 25]])) == 2 * len(texts[1:])


def test_hashed_rows_are_spread_evenly_within_each_size():
    found = prints(*(f"{n:08x}".encode() for n in range(4000)))
    found[:, 25] = 0
    sizes = np.array([3, 102, *[10_000] * 24])
    hashed = criteo_rows.hashed_rows(found, sizes)
    assert hashed.dtype == np.int32
    assert (hashed[:, 0] == 2).all() and (hashed[:, 25] == 0).all()
    counts = np.bincount(hashed[:, 1], minlength=102)
    assert counts[:2].tolist() == [0, 0] and len(counts) == 102
    # Chi-squared of 99 degrees of freedom: mean 99, deviation 14.
    assert np.sum((counts[2:] - 40) ** 2 / 40) < 99 + 5 * 14
    assert 2 <= hashed[:, 2:25].min() and hashed.max() < 10_000
    # Columns hash the same text each in their own way.
    same = [
        np.mean(hashed[:, a] == hashed[:, b])
        for a, b in itertools.combinations(range(2, 8), 2)
    ]
    assert max(same) < 0.01
