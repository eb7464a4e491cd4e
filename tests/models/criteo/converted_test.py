"""Tests of the fast form of a click log."""

import os

import numpy as np
import pytest

from models.criteo import converted
from models.criteo import rows as criteo_rows
from tests.cases import criteo as criteo_cases

Options = converted.Options


@pytest.fixture
def source(tmp_path):
    return criteo_cases.write(tmp_path / "log.tsv", 300)


def convert(source, tmp_path, **kwargs):
    options = Options(**{"field_sizes": 100, **kwargs})
    return converted.open_or_convert(
        source, options=options, cache_dir=tmp_path / "cache"
    )


def records(binary, split):
    parts = [np.fromfile(path, "<i4") for path in binary.parts(split)]
    return np.concatenate(parts).reshape(-1, 40)


def numbers(found):
    """Which rows of `criteo_cases` these are."""
    logs = np.ascontiguousarray(found[:, 1]).view("<f4")
    return np.rint(np.expm1(logs)).astype(int).tolist()


def read(path):
    """The rows of a log, with fingerprints for categories."""
    return np.concatenate(
        [
            criteo_rows.records(batch)
            for source in converted.sources(path)
            for batch in source.batches()
        ]
    )


def hashed(rows, size):
    rows = rows.copy()
    prints = rows[:, 14:].view(np.uint32)
    rows[:, 14:] = criteo_rows.hashed_rows(prints, [size] * 26)
    return rows


def cached(tmp_path):
    return sorted(
        path.name
        for path in (tmp_path / "cache").iterdir()
        if not path.name.startswith(".lock")
    )


def test_all_rows_are_kept_with_their_values(source, tmp_path):
    binary = convert(source, tmp_path)
    assert binary.num_rows == {"train": 250, "validation": 50}
    expected = hashed(read(source), 100)
    seen = []
    for split in ("train", "validation"):
        found = records(binary, split)
        order = numbers(found)
        assert order == sorted(order)  # That of the text.
        np.testing.assert_array_equal(found, expected[order])
        seen += order
    assert sorted(seen) == list(range(300))
    labels = expected[:, 0].view("<f4")
    assert set(labels.tolist()) == {0, 1}


@pytest.mark.parametrize(
    "change", [{"field_sizes": 101}, {"min_count": 2}, {"split": "time"}]
)
def test_other_options_make_another_form(source, tmp_path, change):
    one, other = convert(source, tmp_path), convert(source, tmp_path, **change)
    assert one.directory != other.directory
    assert len(cached(tmp_path)) == 2


def test_a_changed_file_makes_another_form(source, tmp_path):
    first = convert(source, tmp_path)
    when = source.stat().st_mtime_ns
    content = source.read_bytes()
    digit = content[-20:-19]
    source.write_bytes(content[:-20] + b"x" + content[-19:])
    assert digit != b"x"
    os.utime(source, ns=(when, when))  # Only its end gives it away.
    second = convert(source, tmp_path)
    assert second.directory != first.directory
    source.write_bytes(content + criteo_cases.line(300))
    assert sum(convert(source, tmp_path).num_rows.values()) == 301


def test_many_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(converted, "PART_ROWS", 16)
    monkeypatch.setattr(converted, "_COUNTED_VALUES", 600)
    source = criteo_cases.write(tmp_path / "log.tsv", 300)
    few = convert(source, tmp_path, min_count=3)
    assert len(few.parts("train")) == 16  # Of 250 rows.
    monkeypatch.undo()
    whole = convert(source, tmp_path, min_count=3)
    assert few.directory != whole.directory
    for split in ("train", "validation"):
        np.testing.assert_array_equal(
            records(few, split), records(whole, split)
        )


def test_rare_categories_are_counted_in_the_training_rows(source, tmp_path):
    binary = convert(source, tmp_path, min_count=6, field_sizes=2000)
    rows = read(source)
    rows_of_tables = hashed(rows, 2000)
    train, validation = (
        records(binary, split) for split in ("train", "validation")
    )
    order = numbers(train)
    num_rare = 0
    for column in range(26):
        prints = rows[:, 14 + column]
        counts = {
            value: int(np.sum(prints[order] == value)) for value in set(prints)
        }
        for found in (train, validation):
            for row, number in zip(found, numbers(found), strict=True):
                value = prints[number]
                expected = rows_of_tables[number, 14 + column]
                if value and counts[value] < 6:
                    expected = criteo_rows.RARE_ROW
                    num_rare += 1
                assert row[14 + column] == expected
    assert 1000 < num_rare < 6000
    # With a high count all are rare, but the missing ones are still missing.
    none = records(convert(source, tmp_path, min_count=250), "train")
    assert set(none[:, 14:].ravel().tolist()) == {0, 1}


def test_what_cannot_be_converted_leaves_nothing(source, tmp_path):
    with pytest.raises(ValueError, match="field_sizes.* from 3 to .* received"):
        Options(field_sizes=2)
    with pytest.raises(ValueError, match="Both splits must have a row"):
        convert(source, tmp_path, validation_fraction=0.001)
    source.write_bytes(b"1\t2\n" * 10)
    with pytest.raises(ValueError, match="must hold lines of 40 columns"):
        convert(source, tmp_path)
    assert cached(tmp_path) == []


def test_damage_is_noticed(source, tmp_path):
    part = convert(source, tmp_path).parts("validation")[0]
    for damage in (
        lambda: part.write_bytes(part.read_bytes()[:-4]),
        part.unlink,
    ):
        damage()
        with pytest.raises(RuntimeError, match="validation-000000.bin"):
            convert(source, tmp_path)
