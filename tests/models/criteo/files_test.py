"""Tests of finding and reading click logs."""

import functools
import gzip
import pathlib

import pytest

from models.criteo import converted
from tests.cases import criteo as criteo_cases


def read(paths):
    """The first integers of all rows, which number those of the cases."""
    batches = [
        b for source in converted.sources(paths) for b in source.batches()
    ]
    return [n for batch in batches for n in batch.column(1).to_pylist()]


def names(paths, root):
    return [
        str(pathlib.Path(source.name).relative_to(root))
        for source in converted.sources(paths)
    ]


def test_files_patterns_and_directories(tmp_path):
    for name in ("day_10.gz", "day_9", "b.tsv", "train.txt", "notes.txt"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "test.txt").write_bytes(b"")
    (tmp_path / "more.tsv").mkdir()
    found = names(tmp_path, tmp_path)
    assert found == ["b.tsv", "day_9", "day_10.gz", "train.txt"]
    assert names(str(tmp_path / "day_*"), tmp_path) == ["day_9", "day_10.gz"]
    given = [tmp_path / "notes.txt", str(tmp_path / "b.tsv")]
    assert names(given, tmp_path) == ["notes.txt", "b.tsv"]
    odd = tmp_path / "day_[1].tsv"
    odd.write_bytes(b"")
    assert names(odd, tmp_path) == ["day_[1].tsv"]


def test_rows_of_several_files_in_order(tmp_path):
    criteo_cases.write(tmp_path / "day_2.tsv", 5)
    compressed = gzip.compress(criteo_cases.lines(2, first=5))
    compressed += gzip.compress(criteo_cases.lines(2, first=7))
    (tmp_path / "day_10.tsv.gz").write_bytes(compressed)
    assert read(tmp_path) == list(range(9))


@pytest.mark.parametrize("ending", [b"\n", b"\r\n"])
def test_ends_of_lines_and_files(tmp_path, ending):
    content = criteo_cases.lines(3).replace(b"\n", ending)
    path = tmp_path / "a.tsv"
    for end in (content, content.removesuffix(ending)):
        path.write_bytes(b"\xef\xbb\xbf" + end)
        assert read(path) == [0, 1, 2]


ROW = criteo_cases.fields(3)


@functools.cache
def _blocks():
    """Three blocks of rows or so, and a few more."""
    return criteo_cases.lines(9000), criteo_cases.lines(9, first=9000)


def changed(place, value):
    return "\t".join([*ROW[:place], value, *ROW[place + 1 :]]).encode() + b"\n"


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("\t".join(f"name_{n}" for n in range(40)).encode() + b"\n", "#0: "),
        # As in the test file.
        ("\t".join(ROW[1:]).encode() + b"\n", "40 columns, got 39"),
        (changed(0, ""), "no label"),
        (changed(0, "2"), "#0: CSV conversion error"),
        (changed(39, "\t"), "40 columns, got 41"),
        (changed(3, "1.5"), "invalid value '1.5'"),
        (changed(13, "9" * 20), "#13: CSV conversion error to int64"),
        (b"x" * 10_000 + b"\r\n", "40 columns, got 1"),
    ],
    ids=["names", "short", "unlabelled", "label", "long", "part", "large", "x"],
)
def test_malformed_rows_are_left_out_and_told_of_once(
    tmp_path, capfd, line, fault
):
    blocks, more = _blocks()
    path = tmp_path / "a.tsv.gz"
    path.write_bytes(gzip.compress(blocks + line + line + more + line, 1))
    assert read(path) == list(range(9009))
    told = capfd.readouterr().err
    assert told.count("\n") == 1 and len(told) < 1000
    assert f"{path}: 3 of 9012 rows are malformed" in told
    assert "the first one line 9001: " in told and fault in told


@pytest.mark.parametrize(
    "line",
    [
        *(changed(3, text) for text in ("-0", "0012", " 1", "0x10", "9" * 18)),
        changed(39, "\xff\0"),
        b"\n",
        b"\r\n",
    ],
)
def test_what_is_a_row_does_not_depend_on_its_neighbours(tmp_path, line, capfd):
    path = tmp_path / "a.tsv"

    def rows(after):
        path.write_bytes(criteo_cases.lines(3) + line + after)
        (source,) = converted.sources(path)
        return [row for b in source.batches() for row in b.to_pylist()]

    alone = rows(b"")
    assert len(alone) == 4 - (not line.strip())
    assert not capfd.readouterr().err
    assert rows(b"malformed\n") == alone
    assert "1 of" in capfd.readouterr().err


def test_files_that_were_joined(tmp_path, capfd):
    mark = b"\xef\xbb\xbf"
    path = tmp_path / "a.tsv"
    path.write_bytes(
        mark + criteo_cases.lines(2) + mark + criteo_cases.lines(2, first=2)
    )
    assert read(path) == list(range(4)) and not capfd.readouterr().err


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        criteo_cases.lines(3) + b"malformed\n" * 4,
        criteo_cases.lines(30).decode().encode("utf-16"),
        criteo_cases.lines(5) + b"\t" * 5_000_000,
    ],
    ids=["empty", "blank", "more", "utf-16", "endless"],
)
def test_what_is_no_click_log_is_refused(tmp_path, content):
    path = tmp_path / "a.tsv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="must hold lines of 40 columns"):
        read(path)


def test_a_torn_gzip_file_is_refused(tmp_path):
    whole = gzip.compress(criteo_cases.lines(400))
    path = tmp_path / "a.tsv.gz"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="a.tsv.gz must hold"):
        read(path)
