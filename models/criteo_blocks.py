"""Reads a text file, plain or gzip, in blocks of whole lines.

gzip is known by its first bytes, whatever the name. Memory is bounded.
"""

import os
import pathlib
import zlib
from collections.abc import Callable
from collections.abc import Iterator

__all__ = ["BrokenGzipError", "LongLineError", "blocks"]

BLOCK_BYTES = 1 << 20
_READ_BYTES = 1 << 19
_LONGEST_LINE_BYTES = 64 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


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

    Args:
        path: The file.
        block_bytes: Collect at least so much before yielding. Default 1 MiB.
        on_read: Told how many bytes were read from the file, each time.

    Yields:
        Whole lines with their line feeds; one is added to the last line where
        it has none. A UTF-8 byte order mark is left out.

    Raises:
        BrokenGzipError: After the last whole line that could be unpacked.
        LongLineError: If a line is longer than 64 MiB.
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
