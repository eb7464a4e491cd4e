"""Reads click logs: finds the sources, counts and reports what is faulty.

gzip is known by its first bytes, whatever the name. Memory is bounded.
"""

import collections
import gzip
import io
import os
import pathlib
import zlib
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

from models import files as data_files
from models.criteo import rows as criteo_rows

BLOCK_BYTES = 1 << 20
_READ_BYTES = 1 << 19
_LONGEST_LINE_BYTES = 64 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BROKEN_GZIP = (EOFError, gzip.BadGzipFile, zlib.error)
# Of a directory. A day_* file is one of Criteo's 1 TB log, in the same format.
_PATTERNS = ("*.tsv", "*.tsv.gz", "train.txt", "train.txt.gz", "day_*")
# Without one good row among so many lines there is no use in reading on.
_HOPELESS_LINES = 100_000
_SHOWN_BYTES = 80
_EXPECTED = (
    "lines of 40 columns with TABs between them, that is a label 0 or 1, 13 "
    "integers and 26 categories; integers and categories may be empty"
)


def blocks(
    path: str | os.PathLike[str],
    *,
    block_bytes: int = BLOCK_BYTES,
    on_read: Callable[[int], None] = lambda num_bytes: None,
) -> Iterator[bytes]:
    """Yields the lines of a file, many at a time.

    Whole lines with their line feeds; one is added to a last line that has
    none. A UTF-8 byte order mark is left out. `on_read` takes the bytes read
    from disk. If gzip data are broken, their error comes after the last whole
    line that could be unpacked.
    """
    with pathlib.Path(path).open("rb") as opened:
        unpacked, reader, before = None, opened, 0
        if opened.peek(len(_GZIP_MAGIC)).startswith(_GZIP_MAGIC):
            unpacked = _Unpacked(opened)
            reader = io.BufferedReader(unpacked, _READ_BYTES)
        while block := reader.read(block_bytes):
            rest = reader.readline(_LONGEST_LINE_BYTES)
            if len(rest) == _LONGEST_LINE_BYTES:
                raise ValueError(
                    f"A click log must hold {_EXPECTED}; received {path} with "
                    f"no line feed in {len(rest)} bytes. Leave the file out."
                )
            block += rest
            if not before:
                block = block.removeprefix(_BYTE_ORDER_MARK)
            if unpacked and unpacked.broken:  # Its last line may be longer.
                block = block[: block.rfind(b"\n") + 1]
            elif block and not block.endswith(b"\n"):
                block += b"\n"
            on_read(opened.tell() - before)
            before = opened.tell()
            if block:
                yield block
        if unpacked and unpacked.broken:
            raise unpacked.broken


class _Unpacked(io.RawIOBase):
    """What gzip data hold, which end where they are `broken`."""

    def __init__(self, packed: io.BufferedReader) -> None:
        self._unpacked = gzip.GzipFile(fileobj=packed)
        self.broken: Exception | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self.broken:
            return 0
        try:
            found = self._unpacked.read1(len(buffer))
        except _BROKEN_GZIP as error:
            self.broken = error
            return 0
        buffer[: len(found)] = found
        return len(found)


class File(data_files.File):
    """Lines of a click log: a file, plain or gzip."""

    def blocks(self, *, on_read: Callable[[int], None]) -> Iterator[bytes]:
        """Yields whole lines, many at a time; see the function `blocks`."""
        return blocks(self.path, on_read=on_read)


def _prepared(name: str) -> Any:
    # It takes seconds to import, which files need not wait for.
    from models.criteo import tfds

    return tfds.Rows(name)


def sources(paths: data_files.Paths) -> list[Any]:
    """Returns where the lines of files, patterns and directories are."""
    return data_files.sources(
        paths, patterns=_PATTERNS, file=File, prepared=_prepared
    )


class Reader:
    """Iterates over the blocks of sources.

    Faulty lines are skipped and counted, and reported on standard error once
    all is read.

    Attributes:
        counts: By reason, how many faults there were so far.
        num_rows: Good lines so far.
        num_bytes: Bytes read from disk so far, compressed if the file is;
            examples of a prepared data set.
    """

    def __init__(self, paths: data_files.Paths) -> None:
        """Looks for the files; reads nothing yet."""
        self.sources = sources(paths)
        self._reset()

    def _reset(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.num_rows = 0
        self.num_bytes = 0
        self._first: dict[str, str] = {}

    def __iter__(self) -> Iterator[tuple[bytes, criteo_rows.Parsed]]:
        """Yields blocks of whole lines, and what they hold.

        It is an error if there was no good row, or more than half of the lines
        were faulty.
        """
        self._reset()
        for source in self.sources:
            try:
                yield from self._read(source)
            except _BROKEN_GZIP as error:
                self._add("broken_gzip", source.name, str(error))
        self._check_enough()
        if self.counts:
            data_files.tell(
                f"Criteo: {self.num_rows} good rows. {self._description()}"
            )

    def _read(self, source: Any) -> Iterator[tuple[bytes, criteo_rows.Parsed]]:
        num_lines = 0
        for block in source.blocks(on_read=self._add_bytes):
            parsed = criteo_rows.parse(block, starts_file=not num_lines)
            self._count(source.name, num_lines, block, parsed)
            num_lines += len(parsed.reasons)
            self.num_rows += len(parsed.rows)
            yield block, parsed
            if not self.num_rows and self._num_faulty() > _HOPELESS_LINES:
                self._check_enough()
        if not num_lines:
            self._add("empty_file", source.name, "no line at all")

    def _add_bytes(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes

    @property
    def share_read(self) -> float:
        """How much of the sources was read, in [0, 1]."""
        return self.num_bytes / max(1, sum(one.size for one in self.sources))

    def rows(self) -> Iterator[criteo_rows.Rows]:
        """Yields the good rows, some thousands at a time."""
        for _, parsed in self:
            yield parsed.rows

    def _num_faulty(self) -> int:
        """Lines that were meant to be rows."""
        return sum(self.counts[reason] for reason in criteo_rows.REASONS[2:])

    def _check_enough(self) -> None:
        faulty = self._num_faulty()
        if self.num_rows and faulty <= self.num_rows:
            return
        raise ValueError(
            f"A click log must hold {_EXPECTED}; received {self.num_rows} "
            f"good rows and {faulty} others in {len(self.sources)} file(s). "
            f"{self._description()}"
        )

    def _description(self) -> str:
        counted = ", ".join(f"{n} {name}" for name, n in self.counts.items())
        first = " ".join(self._first.values())
        return f"Faults: {counted or 'none'}. {first}".rstrip()

    def _count(
        self,
        name: str,
        lines_before: int,
        block: bytes,
        parsed: criteo_rows.Parsed,
    ) -> None:
        # In the order of the first line of each reason.
        tally = collections.Counter(parsed.reasons[parsed.reasons > 0].tolist())
        for code, number in tally.items():
            line = parsed.reasons.tolist().index(code)
            start, end = parsed.line_starts[line], parsed.line_ends[line]
            text = block[start : min(end, start + _SHOWN_BYTES)]
            columns = block.count(b"\t", start, end) + 1
            self._add(
                criteo_rows.REASONS[code],
                f"{name}, line {lines_before + line + 1}",
                f"{columns} column(s), {text!r}",
                number=number,
            )

    def _add(
        self, reason: str, place: str, received: str, *, number: int = 1
    ) -> None:
        self.counts[reason] += number
        self._first.setdefault(reason, f"First {reason}: {place}: {received}.")
