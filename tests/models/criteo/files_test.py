"""Tests of finding and reading click logs."""

import gzip
import pathlib

import pytest

from models.criteo import files
from tests.cases import criteo as criteo_cases


def read(paths):
    """The first integers of all rows, which number those of the cases."""
    batches = [b for source in files.sources(paths) for b in source.batches()]
    return [n for batch in batches for n in batch.column(1).to_pylist()]


def names(paths, root):
    return [
        str(pathlib.Path(source.name).relative_to(root))
        for source in files.sources(paths)
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
@pytest.mark.parametrize("last", [True, False])
def test_ends_of_lines_and_files(tmp_path, ending, last):
    content = criteo_cases.lines(3).replace(b"\n", ending)
    path = tmp_path / "a.tsv"
    content = content if last else content.removesuffix(ending)
    path.write_bytes(b"\xef\xbb\xbf" + content)
    assert read(path) == [0, 1, 2]


def test_a_log_of_many_blocks(tmp_path):
    path = criteo_cases.write(tmp_path / "a.tsv", 9000)
    assert read(path) == list(range(9000))


ROW = criteo_cases.fields(3)


@pytest.mark.parametrize(
    "fields",
    [
        [f"name_{n}" for n in range(40)],  # Names of columns.
        ROW[1:],  # No label, as in the test file.
        ["", *ROW[1:]],
        ["2", *ROW[1:]],
        [*ROW, ""],
        [*ROW[:3], "1.5", *ROW[4:]],
        [*ROW[:3], "9" * 20, *ROW[4:]],
    ],
    ids=["names", "short", "unlabelled", "label", "long", "part", "large"],
)
def test_lines_that_are_no_rows_are_refused(tmp_path, fields):
    path = tmp_path / "a.tsv"
    line = "\t".join(fields).encode() + b"\n"
    path.write_bytes(criteo_cases.lines(3) + line + criteo_cases.lines(3))
    with pytest.raises(ValueError, match="a.tsv must hold lines of 40 columns"):
        read(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        criteo_cases.lines(30).decode().encode("utf-16"),
        criteo_cases.lines(5) + b"\t" * 5_000_000,
    ],
    ids=["empty", "utf-16", "endless"],
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
