"""Tests of finding and reading click logs."""

import gzip
import pathlib
import random

import numpy as np
import pytest

from models.criteo import files
from models.criteo import rows as criteo_rows
from tests.cases import criteo as criteo_cases

BAD = b"no row\n"


def read(paths, **kwargs):
    reader = files.Reader(paths, **kwargs)
    blocks = list(reader.rows())
    rows = np.concatenate([rows.integers for rows in blocks])
    return rows[:, 0].tolist(), reader


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


def test_rows_of_several_files_in_order(tmp_path, capfd):
    criteo_cases.write(tmp_path / "day_2.tsv", 5)
    compressed = gzip.compress(criteo_cases.lines(4, first=5))
    (tmp_path / "day_10.tsv").write_bytes(compressed)
    rows, reader = read(tmp_path)
    assert rows == list(range(9))
    assert reader.counts == {} and reader.num_rows == 9
    sizes = [source.size for source in reader.sources]
    assert reader.num_bytes == sum(sizes)
    assert capfd.readouterr().err == ""
    # A reader can be read again.
    assert sum(len(rows) for rows in reader.rows()) == reader.num_rows == 9


@pytest.mark.parametrize("ending", [b"\n", b"\r\n"])
@pytest.mark.parametrize("last", [True, False])
def test_ends_of_lines_and_files(tmp_path, ending, last):
    content = criteo_cases.lines(3).replace(b"\n", ending)
    path = tmp_path / "a.tsv"
    content = content if last else content.removesuffix(ending)
    path.write_bytes(b"\xef\xbb\xbf" + content)
    rows, reader = read(path)
    assert rows == [0, 1, 2] and not reader.counts


def faulty(tmp_path):
    """Two files with one fault of each kind, and 12 good rows."""
    names = "\t".join(f"name_{n}" for n in range(40)).encode() + b"\n"
    fields = [criteo_cases.fields(n) for n in range(12)]
    bad_label, bad_integer = list(fields[0]), list(fields[0])
    bad_label[0], bad_integer[3] = "2", "1.5"
    joined = ["\t".join(row).encode() + b"\n" for row in fields]
    first = tmp_path / "a.tsv"
    first.write_bytes(
        names
        + b"".join(joined[:3])
        + "\t".join(fields[0][1:]).encode()  # As in the test file.
        + b"\n\n"
        + joined[0].replace(b"\n", b"\t\n")
        + b"".join(joined[3:9])
    )
    second = tmp_path / "b.tsv"
    second.write_bytes(
        joined[9]
        + "\t".join(bad_label).encode()
        + b"\r\n"
        + "\t".join(bad_integer).encode()
        + b"\n"
        + joined[0].replace(b"\n", b"\xff\n")
        + b"".join(joined[10:])
    )
    return [first, second]


def test_faulty_lines_are_counted_and_told_of_once(tmp_path, capfd):
    rows, reader = read(faulty(tmp_path))
    assert rows == list(range(12))
    assert reader.counts == dict.fromkeys(criteo_rows.REASONS[1:], 1)
    told = capfd.readouterr().err
    assert told.count("\n") == 1
    assert "12 good rows" in told
    for text in (
        "First header: {a}, line 1:",
        "First too_few_columns: {a}, line 5: 39 column(s)",
        "First blank_line: {a}, line 6: 1 column(s), b''",
        "First too_many_columns: {a}, line 7: 41 column(s)",
        "First bad_label: {b}, line 2:",
        "First bad_integer: {b}, line 3:",
        "First invalid_utf8: {b}, line 4:",
    ):
        place = text.format(a=tmp_path / "a.tsv", b=tmp_path / "b.tsv")
        assert place in told


@pytest.mark.parametrize(
    "content",
    [
        b"",
        criteo_cases.lines(3) + BAD * 4,
        criteo_cases.lines(30).decode().encode("utf-16"),
    ],
)
def test_what_is_no_click_log_is_refused(tmp_path, content):
    path = tmp_path / "a.tsv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="must hold lines of 40 columns"):
        read(path)


def test_a_torn_gzip_file_gives_its_whole_lines(tmp_path):
    whole = gzip.compress(criteo_cases.lines(400))
    path = tmp_path / "a.tsv.gz"
    path.write_bytes(whole[: len(whole) // 2])
    rows, reader = read(path)
    assert 100 < len(rows) < 300 and rows == list(range(len(rows)))
    assert reader.counts == {"broken_gzip": 1}
    # With everything but the checksum nothing but that is missing.
    path.write_bytes(whole[:-4])
    rows, reader = read(path)
    assert rows == list(range(400)) and reader.counts == {"broken_gzip": 1}


def blocks(path, **kwargs):
    return list(files.blocks(path, **kwargs))


@pytest.mark.parametrize("size", [1, 100, 1 << 19, (1 << 20) + 1])
def test_blocks_join_to_the_file(tmp_path, size):
    rng = random.Random(0)
    lines = [b"x" * rng.randrange(90) + b"\n" for _ in range(60_000)]
    content = b"".join(lines)
    members = [content[n : n + 700_000] for n in range(0, 2_000_000, 700_000)]
    members.append(content[2_100_000:])
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    plain.write_bytes(content)
    packed.write_bytes(b"\0\0".join(map(gzip.compress, members)) + b"\0" * 9)
    for path in (plain, packed):
        read = []
        found = blocks(path, block_bytes=size, on_read=read.append)
        assert b"".join(found) == content
        assert all(block.endswith(b"\n") for block in found)
        assert sum(read) == path.stat().st_size
        assert len(found) > 1


def test_one_endless_line_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_LONGEST_LINE_BYTES", 1000)
    path = tmp_path / "a.tsv"
    path.write_bytes(criteo_cases.lines(5) + b"\t" * 5_000_000)
    with pytest.raises(ValueError, match="no line feed in .*Leave the file"):
        read(path)
