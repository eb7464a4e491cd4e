"""Reads click logs by Arrow's parser, some thousand rows at a time.

A row has 40 columns with TABs between them: a label (0 or 1), 13 integers that
may be missing or negative, and 26 categories, which are any text and may be
missing too. Nothing is quoted. Malformed rows are counted and left out. Memory
is bounded.
"""

import io
import re
from collections.abc import Iterator

import pyarrow as pa
from pyarrow import csv

from models import files as data_files
from models.criteo import rows

_BLOCK_BYTES = 1 << 20
_LONGEST_LINE_BYTES = 1 << 20
# Names in a directory. A day_* file is from Criteo's 1 TB log, in this format.
PATTERNS = ("*.tsv", "*.tsv.gz", "train.txt", "train.txt.gz", "day_*")
_READ = csv.ReadOptions(
    column_names=rows.SCHEMA.names,
    # All that is parsed at a time is one block of Arrow's.
    block_size=_BLOCK_BYTES + _LONGEST_LINE_BYTES,
)
# With several faults in a line, threads would find any of them.
_READ_ONE = csv.ReadOptions(
    column_names=_READ.column_names,
    block_size=_READ.block_size,
    use_threads=False,
)
_PARSE = csv.ParseOptions(delimiter="\t", quote_char=False)
_CONVERT = csv.ConvertOptions(
    column_types=rows.SCHEMA,
    null_values=[""],
    true_values=["1"],
    false_values=["0"],
)
# Rows that Arrow surely takes. It is asked about all others, one by one.
_GOOD = re.compile(rb"[01](\t(-?\d{1,18})?){13}(\t[^\t\r\n]*){26}[\r\n]*")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class File(data_files.File):
    """A click log, which is unpacked if its name ends in .gz."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yields its rows in order, in the columns of `rows.SCHEMA`.

        Malformed rows are left out; standard error has their number, and the
        first one's line and fault, once all is read. A ValueError if there are
        more of them than of good ones so far, or the file cannot be unpacked.
        """
        num_rows = num_lines = num_malformed = 0
        first = ""
        try:
            for block in self._blocks():
                faults: dict[int, str] = {}
                try:
                    found = _parsed(block)
                except pa.ArrowInvalid:
                    found, faults = _sorted_out(block)
                if faults and not num_malformed:
                    line, fault = next(iter(faults.items()))
                    first = f", the first one line {num_lines + line}: {fault}"
                num_lines += block.count(b"\n")
                num_malformed += len(faults)
                num_rows += found.num_rows
                if num_malformed > num_rows:
                    break
                yield from found.to_batches()
            told = (
                f"{num_malformed} of {num_malformed + num_rows} rows are "
                f"malformed{first}"
            )
            if num_malformed > num_rows or not num_rows:
                raise ValueError(told)
        except (OSError, ValueError) as cause:
            raise ValueError(
                f"{self.name} must hold lines of 40 columns with TABs between "
                "them, that is a label 0 or 1, 13 integers and 26 categories; "
                "integers and categories may be empty. It cannot be read: "
                f"{cause}. Remove other lines, such as column names."
            ) from cause
        if num_malformed:
            data_files.tell(f"Criteo: leaving out of {self.name}: {told}")

    def _blocks(self) -> Iterator[bytes]:
        """Yields whole lines, about a megabyte at a time."""
        with io.BufferedReader(pa.input_stream(str(self.path))) as opened:
            while block := opened.read(_BLOCK_BYTES):
                rest = opened.readline(_LONGEST_LINE_BYTES)
                if len(rest) == _LONGEST_LINE_BYTES:
                    raise ValueError(f"a line has over {len(rest)} bytes")
                yield block + rest


def _parsed(lines: bytes, *, read: csv.ReadOptions = _READ) -> pa.Table:
    """Returns the rows of whole lines; ArrowInvalid if one is malformed."""
    found = csv.read_csv(
        pa.BufferReader(lines),
        read_options=read,
        parse_options=_PARSE,
        convert_options=_CONVERT,
    )
    # A label, unlike all else, is never missing.
    if found.column(0).null_count:
        raise pa.ArrowInvalid("it has no label")
    return found


def _sorted_out(lines: bytes) -> tuple[pa.Table, dict[int, str]]:
    """Returns the good rows, and what is wrong with others, by line from 1."""
    good, faults = [b"\n"], {}  # Arrow needs a line, if only an empty one.
    for number, line in enumerate(lines.splitlines(keepends=True), start=1):
        # Arrow takes it at the beginning only, but files may be joined.
        line = line.removeprefix(_BYTE_ORDER_MARK)
        try:
            if not _GOOD.fullmatch(line):
                _parsed(line, read=_READ_ONE)
            good.append(line)
        except pa.ArrowInvalid as fault:
            faults[number] = str(fault).replace("Row #1: ", "")
    return _parsed(b"".join(good)), faults
