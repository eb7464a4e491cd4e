"""Reads click logs: finds the sources, counts and reports what is faulty.

gzip is known by its first bytes, whatever the name. Memory is bounded.
"""

import collections
import glob
import hashlib
import os
import pathlib
import sys
import zlib
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import Protocol

from models import files as data_files
from models.criteo import rows as criteo_rows

BLOCK_BYTES = 1 << 20
_READ_BYTES = 1 << 19
_LONGEST_LINE_BYTES = 64 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Of the beginning and the end of a file, to know it again by.
_SAMPLE_BYTES = 1 << 16


class BrokenGzipError(Exception):
    """A gzip file ends too early, or does not fit its checksums."""


class LongLineError(Exception):
    """There is no line feed in tens of megabytes."""


def blocks(
    path: str | os.PathLike[str],
    *,
    block_bytes: int = BLOCK_BYTES,
    on_read: Callable[[int], None] | None = None,
) -> Iterator[bytes]:
    """Yields the lines of a file, many at a time.

    Whole lines with their line feeds; one is added to a last line that has
    none. A UTF-8 byte order mark is left out. `on_read` takes the bytes read
    from disk. BrokenGzipError comes after the last whole line that could be
    unpacked.
    """
    lines = _Lines(block_bytes)
    broken: Exception | None = None
    try:
        for chunk in _chunks(pathlib.Path(path), on_read or (lambda _: None)):
            yield from lines.add(chunk)
    except BrokenGzipError as error:
        broken = error
    # Where data ends too early, the last line may have been longer.
    yield from lines.finish(complete=broken is None)
    if broken is not None:
        raise broken


class _Lines:
    """Cuts a stream of bytes after line feeds."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self._is_start = True

    def add(self, chunk: bytes) -> Iterator[bytes]:
        self._parts.append(chunk)
        self._num_bytes += len(chunk)
        if self._num_bytes < self._block_bytes or b"\n" not in chunk:
            if self._num_bytes > _LONGEST_LINE_BYTES + self._block_bytes:
                raise LongLineError(
                    f"no line feed in {len(chunk)} to {self._num_bytes} bytes"
                )
            return
        yield from self._cut(b"".join(self._parts))

    def finish(self, *, complete: bool) -> Iterator[bytes]:
        rest = b"".join(self._parts)
        if complete and rest and not rest.endswith(b"\n"):
            rest += b"\n"
        yield from self._cut(rest)

    def _cut(self, joined: bytes) -> Iterator[bytes]:
        end = joined.rfind(b"\n") + 1
        self._parts, self._num_bytes = [joined[end:]], len(joined) - end
        block = joined[:end]
        if self._is_start:
            block = block.removeprefix(_BYTE_ORDER_MARK)
            self._is_start = False
        if block:
            yield block


def _chunks(
    path: pathlib.Path, on_read: Callable[[int], None]
) -> Iterator[bytes]:
    with path.open("rb") as opened:
        chunk = opened.read(_READ_BYTES)
        gzip = _Gzip() if chunk.startswith(_GZIP_MAGIC) else None
        while chunk:
            on_read(len(chunk))
            if gzip is None:
                yield chunk
            else:
                yield from gzip.unpack(chunk)
            chunk = opened.read(_READ_BYTES)
    if gzip is not None:
        gzip.check_end()


class _Gzip:
    """Unpacks gzip of one or several members, as far as it goes."""

    def __init__(self) -> None:
        self._renew()

    def _renew(self) -> None:
        self._member = zlib.decompressobj(zlib.MAX_WBITS | 16)
        self._begun = False

    def check_end(self) -> None:
        if self._begun:
            raise BrokenGzipError("the end of the gzip data is missing")

    def unpack(self, chunk: bytes) -> Iterator[bytes]:
        full = False
        while chunk or full:
            if not self._begun:
                # Some tools pad members with zeros.
                chunk = chunk.lstrip(b"\0")
                if not chunk:
                    return
                self._begun = True
            try:
                # In parts: a small file may unpack to a very large one.
                data = self._member.decompress(chunk, BLOCK_BYTES)
            except zlib.error as error:
                raise BrokenGzipError(str(error)) from error
            full = len(data) == BLOCK_BYTES and not self._member.eof
            chunk = self._member.unconsumed_tail
            if self._member.eof:
                chunk = self._member.unused_data
                self._renew()
            if data:
                yield data


POLICIES = ("skip", "refuse")
# Of a directory. A day_* file is one of Criteo's 1 TB log, in the same format.
_PATTERNS = ("*.tsv", "*.tsv.gz", "train.txt", "train.txt.gz", "day_*")
# Without one good row among so many lines there is no use in reading on.
_HOPELESS_LINES = 100_000
_SHOWN_BYTES = 80
_EXPECTED = (
    "lines of 40 columns with TABs between them, that is a label 0 or 1, 13 "
    "integers and 26 categories; integers and categories may be empty"
)
_REMEDIES = {
    "empty_file": "Leave the file out",
    "broken_gzip": "Copy the file again",
    "header": "Remove the line",
}


def default_path() -> pathlib.Path:
    """Returns `criteo` in the data directory, which TFDISTILL_DATA names."""
    return data_files.data_dir() / "criteo"


class Source(Protocol):
    """Lines of a click log.

    Attributes:
        name: What messages call it.
        size: In the units that `blocks` reports; 0 if empty.
    """

    name: str
    size: int

    def identity(self) -> dict[str, Any]:
        """Returns what changes whenever the lines do, as JSON has it."""

    def blocks(self, *, on_read: Callable[[int], None]) -> Iterator[bytes]:
        """Yields whole lines, many at a time."""


Paths = data_files.Path | Sequence[data_files.Path | Source]


class File:
    """A file, plain or gzip."""

    def __init__(self, path: pathlib.Path) -> None:
        self.name = str(path)
        self._path = path
        self.size = path.stat().st_size

    def identity(self) -> dict[str, Any]:
        """Returns what changes whenever the lines do, as JSON has it."""
        found = self._path.stat()
        with self._path.open("rb") as opened:
            sample = opened.read(_SAMPLE_BYTES)
            opened.seek(max(0, found.st_size - _SAMPLE_BYTES))
            sample += opened.read(_SAMPLE_BYTES)
        return {
            "name": self._path.name,
            "bytes": found.st_size,
            "modified_nanoseconds": found.st_mtime_ns,
            "sample_sha256": hashlib.sha256(sample).hexdigest(),
        }

    def blocks(self, *, on_read: Callable[[int], None]) -> Iterator[bytes]:
        """Yields whole lines, many at a time; see the function `blocks`."""
        return blocks(self._path, on_read=on_read)


def sources(paths: Paths) -> list[Source]:
    """Returns where the lines of paths, patterns and directories are.

    A path is a file, a pattern such as `day_*.gz`, or a directory (its
    `*.tsv`, `train.txt` and `day_*`, each also with `.gz`). Files come as
    given, and in natural order (day_9 before day_10) within a pattern or
    directory; other sources stay as they are.
    """
    found: list[Source] = []
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        if isinstance(path, str | os.PathLike):
            found += map(File, _expand(pathlib.Path(path)))
        else:
            found.append(path)
    data_files.check_names([source.name for source in found])
    return found


def _expand(path: pathlib.Path) -> list[pathlib.Path]:
    if path.is_file():
        return [path]
    if path.is_dir():
        matches = {m for name in _PATTERNS for m in path.glob(name)}
        wanted = f"a directory that holds {', '.join(_PATTERNS)}"
    else:
        matches = {pathlib.Path(m) for m in glob.glob(str(path))}
        wanted = "an existing file, pattern or directory"
    files = sorted(
        (m for m in matches if m.is_file()), key=data_files.natural_order
    )
    if not files:
        raise ValueError(
            f"`path` must be {wanted}; received {str(path)!r}, which stands "
            "for no file. Set `path` to where the click log is."
        )
    return files


class Reader:
    """Iterates over the blocks of sources.

    Faulty lines are skipped and counted, and reported on standard error once
    all is read; or the first one is an error.

    Attributes:
        counts: By reason, how many faults there were so far.
        num_rows: Good lines so far.
        num_bytes: Bytes read from disk so far, compressed if the file is;
            examples of a prepared data set.
    """

    def __init__(self, paths: Paths, *, malformed: str = "skip") -> None:
        """Looks for the files; reads nothing yet."""
        if malformed not in POLICIES:
            raise ValueError(
                f"`malformed` must be one of {POLICIES}; received "
                f"{malformed!r}."
            )
        self.sources = sources(paths)
        self._refuse = malformed == "refuse"
        self._reset()

    def _reset(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.num_rows = 0
        self.num_bytes = 0
        self._first: dict[str, str] = {}

    def __iter__(self) -> Iterator[tuple[bytes, criteo_rows.Parsed]]:
        """Yields blocks of whole lines, and what they hold.

        A faulty line is an error if those are refused; in the end it is one if
        there was no good row, or more than half were faulty.
        """
        self._reset()
        for source in self.sources:
            try:
                yield from self._read(source)
            except BrokenGzipError as error:
                self._add("broken_gzip", source.name, str(error))
            except LongLineError as error:
                raise ValueError(
                    f"A click log must hold {_EXPECTED}; received "
                    f"{source.name} with {error}. Leave the file out."
                ) from error
        self._check_enough()
        self._tell()

    def _read(
        self, source: Source
    ) -> Iterator[tuple[bytes, criteo_rows.Parsed]]:
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

    def _tell(self) -> None:
        if self.counts:
            print(
                f"Criteo: {self.num_rows} good rows. {self._description()}",
                file=sys.stderr,
                flush=True,
            )

    def _count(
        self,
        name: str,
        lines_before: int,
        block: bytes,
        parsed: criteo_rows.Parsed,
    ) -> None:
        codes = parsed.reasons[parsed.reasons > 0]
        if not len(codes):
            return
        tally = collections.Counter(codes.tolist())
        first = {code: parsed.reasons.tolist().index(code) for code in tally}
        for code in sorted(tally, key=lambda code: first[code]):
            line = first[code]
            start, end = parsed.line_starts[line], parsed.line_ends[line]
            text = block[start : min(end, start + _SHOWN_BYTES)]
            columns = block.count(b"\t", start, end) + 1
            self._add(
                criteo_rows.REASONS[code],
                f"{name}, line {lines_before + line + 1}",
                f"{columns} column(s), {text!r}",
                number=tally[code],
            )

    def _add(
        self, reason: str, place: str, received: str, *, number: int = 1
    ) -> None:
        if self._refuse:
            remedy = _REMEDIES.get(reason, "Correct the line")
            raise ValueError(
                f"A click log must hold {_EXPECTED}; received {reason} at "
                f"{place}: {received}. {remedy}, or use malformed='skip'."
            )
        self.counts[reason] += number
        self._first.setdefault(reason, f"First {reason}: {place}: {received}.")
