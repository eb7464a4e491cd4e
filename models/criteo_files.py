"""Reads click logs: finds the files, counts and reports what is faulty."""

import collections
import glob
import os
import pathlib
import sys
from collections.abc import Iterator
from collections.abc import Sequence

from models import criteo_blocks
from models import criteo_rows
from models import data_places

__all__ = ["POLICIES", "Reader", "default_path", "expand"]

POLICIES = ("skip", "refuse")
# Of a directory. A day_* file is one of Criteo's 1 TB log, in the same format.
_PATTERNS = ("*.tsv", "*.tsv.gz", "train.txt", "train.txt.gz", "day_*")
# Without one good row among so many lines there is no use in reading on.
_HOPELESS_LINES = 100_000
_SHOWN_BYTES = 80
_EXPECTED = (
    "lines of 40 columns with TABs between them, that is a label 0 or 1, 13 "
    "integers and 26 categories, where integers and categories may be empty"
)
_REMEDIES = {
    "empty_file": "Leave the file out",
    "broken_gzip": "Copy the file again",
    "header": "Remove the line",
}

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def default_path() -> pathlib.Path:
    """Returns `criteo` in the data directory, which TFDISTILL_DATA names."""
    return data_places.data_dir() / "criteo"


def expand(paths: Paths) -> list[pathlib.Path]:
    """Returns the files that paths, patterns and directories stand for.

    Args:
        paths: A file, a pattern such as `day_*.gz`, a directory (its `*.tsv`,
            `train.txt` and `day_*`, each also with `.gz`), or several of them.

    Returns:
        Existing files: as given, and in natural order (day_9 before day_10)
        within a pattern or directory.

    Raises:
        ValueError: If one of them stands for no file, or a file comes twice.
    """
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    found: list[pathlib.Path] = []
    for path in paths:
        found += _expand_one(pathlib.Path(path))
    data_places.check_names(found)
    return found


def _expand_one(path: pathlib.Path) -> list[pathlib.Path]:
    if path.is_file():
        return [path]
    if path.is_dir():
        matches = {m for name in _PATTERNS for m in path.glob(name)}
        wanted = f"a directory that holds {', '.join(_PATTERNS)}"
    else:
        matches = {pathlib.Path(m) for m in glob.glob(str(path))}
        wanted = "an existing file, pattern or directory"
    files = sorted(
        (m for m in matches if m.is_file()), key=data_places.natural_order
    )
    if not files:
        raise ValueError(
            f"`path` must be {wanted}; received {str(path)!r}, which stands "
            "for no file. Set `path` to where the click log is."
        )
    return files


class Reader:
    """Iterates over the blocks of files.

    Faulty lines are skipped and counted, and told of on standard error once
    all is read; or the first one is an error.

    Attributes:
        counts: By reason, how many faults there were so far.
        num_rows: Good lines so far.
        num_bytes: Bytes read from disk so far, compressed where the file is.
    """

    def __init__(self, paths: Paths, *, malformed: str = "skip") -> None:
        """Looks for the files; reads nothing yet.

        Args:
            paths: As for `expand`.
            malformed: What becomes of a faulty line: `"skip"` (default) or
                `"refuse"`.

        Raises:
            ValueError: If there are no such files, or `malformed` is neither.
        """
        if malformed not in POLICIES:
            raise ValueError(
                f"`malformed` must be one of {POLICIES}; received "
                f"{malformed!r}."
            )
        self.paths = expand(paths)
        self._refuse = malformed == "refuse"
        self._reset()

    def _reset(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.num_rows = 0
        self.num_bytes = 0
        self._first: dict[str, str] = {}

    def __iter__(self) -> Iterator[tuple[bytes, criteo_rows.Parsed]]:
        """Yields blocks of whole lines, and what they hold.

        Raises:
            ValueError: At a faulty line if those are refused; or in the end,
                if there was no good row, or more than half were faulty.
        """
        self._reset()
        for path in self.paths:
            try:
                yield from self._read(path)
            except criteo_blocks.BrokenGzipError as error:
                self._add("broken_gzip", str(path), str(error))
            except criteo_blocks.LongLineError as error:
                raise ValueError(
                    f"A click log must hold {_EXPECTED}; received {path} with "
                    f"{error}. Leave the file out."
                ) from error
        self._check_enough()
        self._tell()

    def _read(
        self, path: pathlib.Path
    ) -> Iterator[tuple[bytes, criteo_rows.Parsed]]:
        num_lines = 0
        for block in criteo_blocks.blocks(path, on_read=self._add_bytes):
            parsed = criteo_rows.parse(block, starts_file=not num_lines)
            self._count(path, num_lines, block, parsed)
            num_lines += len(parsed.reasons)
            self.num_rows += len(parsed.rows)
            yield block, parsed
            if not self.num_rows and self._num_faulty() > _HOPELESS_LINES:
                self._check_enough()
        if not num_lines:
            self._add("empty_file", str(path), "no line at all")

    def _add_bytes(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes

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
            f"good rows and {faulty} others in {len(self.paths)} file(s). "
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
        path: pathlib.Path,
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
                f"{path}, line {lines_before + line + 1}",
                f"{columns} column(s), {text!r}",
                number=tally[code],
            )

    def _add(
        self, reason: str, place: str, received: str, *, number: int = 1
    ) -> None:
        if self._refuse:
            remedy = _REMEDIES.get(reason, "Mend the line")
            raise ValueError(
                f"A click log must hold {_EXPECTED}; received {reason} at "
                f"{place}: {received}. {remedy}, or use malformed='skip'."
            )
        self.counts[reason] += number
        self._first.setdefault(reason, f"First {reason}: {place}: {received}.")
