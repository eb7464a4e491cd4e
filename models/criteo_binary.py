"""Opens the fast form of a click log, made from the text at the first call.

A row is 40 little-endian 32-bit words: the label and 13 transformed integers
as float32 (NaN where missing), then 26 rows of embedding tables as int32. A
split is a sequence of part files of equal length; header.json tells the
rest, and is written last.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from models import criteo_convert
from models import criteo_files
from models import criteo_options
from models import criteo_rows
from models import criteo_writer
from models import data_places
from models import made_once

__all__ = ["Binary", "open_or_convert"]

# Change it with anything that changes what is written.
_VERSION = 1
_HEADER = "header.json"
_SAMPLE_BYTES = 1 << 16

_RECORD_BYTES = 4 * criteo_rows.NUM_COLUMNS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Binary:
    """A converted click log.

    Attributes:
        directory: Holds the part files.
        num_rows: By split, `"train"` and `"validation"`.
        part_rows: Rows of each part file but a split's last.
        header: All that header.json says.
    """

    directory: pathlib.Path
    num_rows: Mapping[str, int]
    part_rows: int
    header: Mapping[str, Any]

    def parts(self, split: str) -> list[pathlib.Path]:
        """Returns the part files of a split, in order."""
        num_parts = -(-self.num_rows[split] // self.part_rows)
        names = (criteo_writer.part_name(split, n) for n in range(num_parts))
        return [self.directory / name for name in names]


def open_or_convert(
    paths: criteo_files.Paths,
    *,
    options: criteo_options.Options,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Binary:
    """Returns the fast form of files, which is made at the first call.

    Args:
        paths: As for `criteo_files.expand`. A change of name, size, time of
            modification, beginning or end of a file makes for another form.
        options: What it depends on besides.
        cache_dir: Where it is kept: as much disk as the text needs, and half
            as much again while it is made. Default: `tfdistill` in the user's
            cache directory.

    Returns:
        The fast form, checked for completeness.

    Raises:
        ValueError: If the files or options are at fault.
        RuntimeError: If what was converted before is damaged.
    """
    reader = criteo_files.Reader(paths, malformed=options.malformed)
    sources = [_identity(path) for path in reader.paths]
    wanted = {
        "version": _VERSION,
        "part_rows": criteo_writer.PART_ROWS,
        "options": dataclasses.asdict(options),
        "sources": sources,
    }
    text = json.dumps(wanted, sort_keys=True)
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    final = data_places.cache_dir(cache_dir) / f"criteo-{key}"

    def make(aside: pathlib.Path) -> None:
        found = criteo_convert.convert(reader, options, aside)
        if [_identity(path) for path in reader.paths] != sources:
            raise RuntimeError(
                "Files of the click log changed while they were converted. "
                "Start again once they are complete."
            )
        header = json.dumps({**wanted, **found}, indent=1, sort_keys=True)
        (aside / _HEADER).write_text(header, "utf-8")

    made_once.made_once(final, make)
    return _open(final)


def _identity(path: pathlib.Path) -> dict[str, Any]:
    found = path.stat()
    with path.open("rb") as opened:
        sample = opened.read(_SAMPLE_BYTES)
        opened.seek(max(0, found.st_size - _SAMPLE_BYTES))
        sample += opened.read(_SAMPLE_BYTES)
    return {
        "name": path.name,
        "bytes": found.st_size,
        "modified_nanoseconds": found.st_mtime_ns,
        "sample_sha256": hashlib.sha256(sample).hexdigest(),
    }


def _open(directory: pathlib.Path) -> Binary:
    header = json.loads((directory / _HEADER).read_text("utf-8"))
    binary = Binary(
        directory=directory,
        num_rows=header["num_rows"],
        part_rows=header["part_rows"],
        header=header,
    )
    for split, num_rows in binary.num_rows.items():
        for path in binary.parts(split):
            expected = min(num_rows, binary.part_rows) * _RECORD_BYTES
            num_rows -= binary.part_rows
            if not path.is_file() or path.stat().st_size != expected:
                raise RuntimeError(
                    f"{path} must have {expected} bytes; it was damaged after "
                    f"it was made. Delete {directory}, and start again."
                )
    return binary
