""""""

import itertools
import random
import re

import numpy as np
import pytest

from models.criteo import rows as criteo_rows
from tests.cases import criteo as criteo_cases

ROW = ["1", "5", "-2", *[""] * 37]


def block(*rows):
    return b"".join("\t".join(row).encode() + b"\n" for row in rows)


def changed(column, value):
    row = list(ROW)
    row[column] = value
    return row


def reason_of(line, **kwargs):
    parsed = criteo_rows.parse(line, **kwargs)
    assert len(parsed.reasons) == 1
    assert len(parsed.rows) == (parsed.reasons[0] == 0)
    return criteo_rows.REASONS[parsed.reasons[0]]


def test_fields_of_a_row():
    rows = criteo_rows.parse(block(ROW, changed(39, "abc"))).rows
    assert rows.labels.tolist() == [1, 1]
    assert rows.integers[0].tolist() == [5, -2] + [0] * 11
    assert rows.missing[0].tolist() == [False] * 2 + [True] * 11
    assert not rows.fingerprints[0].any()
    assert np.flatnonzero(rows.fingerprints[1]).tolist() == [25]


@pytest.mark.parametrize(
    "text",
    ["0", "7", "-1", "-0", "00012", "99999999", "-99999999", "123456789"]
    + ["-123456789012", "999999999999999999", "-999999999999999999"],
)
def test_integers_of_any_length(text):
    for column in (1, 13):
        rows = criteo_rows.parse(block(changed(column, text))).rows
        assert rows.integers[0, column - 1] == int(text)
        assert not rows.missing[0, column - 1]


@pytest.mark.parametrize(
    "text",
    ["x", "-", "--1", "1-", "+1", "1.5", " 1", "1 ", "1e3", "0x10", "NA", "½"]
    + ["12345678x", "-12345678x", "9" * 19, "-" + "9" * 19, "9" * 5000, "\0"]
    + ["1\r", ":", "/"],
)
def test_what_is_no_integer(text):
    for column in (1, 13):
        assert reason_of(block(changed(column, text))) == "bad_integer"


def test_carriage_returns_are_no_part_of_the_last_column():
    for last in ("", "abc", "abcdefgh", "abcdefghi"):
        plain = block(changed(39, last))
        windows = plain.replace(b"\n", b"\r\n")
        one, other = (criteo_rows.parse(text).rows for text in (plain, windows))
        np.testing.assert_array_equal(one.fingerprints, other.fingerprints)


def test_texts_that_differ_in_any_way_have_other_fingerprints():
    texts = ["a", "b", "aa", "a\0", "\0", "\0\0", "abcdefgh", "abcdefg"]
    texts += ["abcdefgh\0", "abcdefghi", "abcdefghj", "ibcdefgha", "ü", "u"]
    texts += ["x" * n for n in (15, 16, 17, 31, 32, 33, 500)]
    texts += ["x" * 16 + "y" * 8 + "z" * 8, "x" * 16 + "z" * 8 + "y" * 8]
    rows = criteo_rows.parse(
        block(*(changed(c, t) for t in texts for c in (14, 39)))
    ).rows
    first = rows.fingerprints[0::2, 0].tolist()
    last = rows.fingerprints[1::2, 25].tolist()
    assert len(set(first) | set(last)) == 2 * len(texts)
    assert 0 not in first + last


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
    texts = [
        "00000001",
        "",
        "a category",
        "ä",
        "exactly 8",
        "17 bytes of text.",
    ]
    row = [*ROW[:14], *texts, *[""] * 20]
    found = criteo_rows.parse(block(row)).rows.fingerprints[0, :6]
    expected = [plain_fingerprint(n, t.encode()) for n, t in enumerate(texts)]
    assert found.tolist() == expected


def test_hashed_rows_are_spread_evenly_within_each_size():
    texts = [f"{n:08x}" for n in range(4000)]
    rows = criteo_rows.parse(
        block(*([*ROW[:14], *[t] * 25, ""] for t in texts))
    ).rows
    sizes = np.array([3, 102, *[10_000] * 24])
    hashed = criteo_rows.hashed_rows(rows.fingerprints, sizes)
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


def reference(line):
    """What a line holds or lacks, found in the plainest way."""
    text = line.removesuffix(b"\n").removesuffix(b"\r")
    if not text:
        return "blank_line"
    columns = text.count(b"\t") + 1
    try:
        parts = text.decode().split("\t")
    except UnicodeDecodeError:
        return "invalid_utf8"
    if columns != 40:
        return "too_few_columns" if columns < 40 else "too_many_columns"
    if parts[0] not in ("0", "1"):
        return "bad_label"
    for part in parts[1:14]:
        if part and not re.fullmatch("-?[0-9]+", part):
            return "bad_integer"
    return [int(parts[0]), [int(p or 0) for p in parts[1:14]], parts[14:]]


def damaged(line, rng):
    """Changes, adds or takes away some bytes, separators above all."""
    line = bytearray(line)
    for _ in range(rng.choice([0, 0, 1, 2])):
        place = rng.randrange(len(line))
        byte = rng.choice([9, 9, 13, 0, 0xC3, 0xFF, *b"-0a"])
        if rng.random() < 0.4:
            line[place : place + 1] = b""
        else:
            line[place : place + rng.randrange(2)] = bytes([byte])
    return bytes(line).replace(b"\n", b"") + rng.choice([b"\n", b"\r\n"])


def test_damaged_lines_are_judged_as_in_a_plain_parser():
    rng = random.Random(0)
    lines = [damaged(criteo_cases.line(n), rng) for n in range(3000)]
    parsed = criteo_rows.parse(b"".join(lines))
    expected = [reference(line) for line in lines]
    found = [criteo_rows.REASONS[code] for code in parsed.reasons]
    reasons = [e if isinstance(e, str) else "" for e in expected]
    # Which of several faults is named is of no importance.
    assert [bool(r) for r in found] == [bool(r) for r in reasons]
    assert np.mean([f == r for f, r in zip(found, reasons, strict=True)]) > 0.9
    assert 500 < sum(map(bool, reasons)) < 2500
    good = [e for e in expected if not isinstance(e, str)]
    assert parsed.rows.labels.tolist() == [g[0] for g in good]
    assert parsed.rows.integers.tolist() == [g[1] for g in good]
    prints = parsed.rows.fingerprints
    known = {}
    for row, (_, _, texts) in zip(prints.tolist(), good, strict=True):
        for column, (text, value) in enumerate(zip(texts, row, strict=True)):
            assert (value == 0) == (text == "")
            assert known.setdefault((column, text), value) == value
