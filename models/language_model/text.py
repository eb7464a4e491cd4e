"""Reads documents of text from files: plain, gzip or xz, one on each line."""

import glob
import gzip
import io
import lzma
import os
import pathlib
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from models import files as data_files

_FIELD = "text"


class PreparedSource(data_files.Prepared):
    """The documents of a data set of TensorFlow Datasets; see `Source`."""

    def __init__(self, name: str) -> None:
        super().__init__(name, features={_FIELD: (tf.string, ())})

    def documents(self) -> Iterator[str]:
        """Yields the documents in order, without blank ones."""
        for example in self.examples().as_numpy_iterator():
            text = " ".join(example[_FIELD].decode("utf-8", "replace").split())
            if text:
                yield text


_COMPRESSIONS = ("", ".gz", ".xz")
_SUFFIXES = tuple(f"{k}{c}" for k in (".txt", ".tsv") for c in _COMPRESSIONS)
# In reviews of films, and in nothing that one reads.
_LINE_BREAK = "<br />"


class Source:
    """The documents of one file.

    Attributes:
        name: What messages call it.
    """

    def __init__(self, path: pathlib.Path) -> None:
        """Looks at nothing yet."""
        self.name = str(path)
        self._path = path

    def identity(self) -> dict[str, Any]:
        """Returns what changes whenever the documents do, as JSON has it."""
        found = self._path.stat()
        return {
            "name": self._path.name,
            "bytes": found.st_size,
            "modified_nanoseconds": found.st_mtime_ns,
        }

    def documents(self) -> Iterator[str]:
        """Yields the documents in order, without blank ones.

        Bytes that are not UTF-8 become U+FFFD; how many documents had such is
        reported on standard error in the end.
        """
        num_faulty = 0
        has_fields = ".tsv" in self._path.suffixes
        try:
            with _open(self._path) as lines:
                for line in lines:
                    text = line.decode("utf-8", "replace")
                    num_faulty += "\ufffd" in text
                    text = _without_fields(text) if has_fields else text
                    text = text.strip()
                    if text:
                        yield text
        except (
            EOFError,
            gzip.BadGzipFile,
            lzma.LZMAError,
            zlib.error,
        ) as cause:
            raise ValueError(
                f"{self.name} must be a whole {self._path.suffix} file; "
                f"received a broken one ({cause}). Copy it again."
            ) from cause
        if num_faulty:
            print(
                f"Text: {self.name} has {num_faulty} document(s) with bytes "
                "that are not UTF-8; U+FFFD stands for those.",
                file=sys.stderr,
                flush=True,
            )


def _open(path: pathlib.Path) -> io.BufferedIOBase:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    if path.suffix == ".xz":
        return lzma.open(path, "rb")
    return path.open("rb")


def _without_fields(line: str) -> str:
    # Quotation marks are text: such files are split only at tabs.
    return line.rpartition("\t")[2].replace(_LINE_BREAK, " ")


def default_path() -> pathlib.Path:
    """Returns `imdb` in the data directory, which TFDISTILL_DATA names."""
    return data_files.data_dir() / "imdb"


def sources(paths: data_files.Paths) -> list[Any]:
    """Returns where the documents of paths, patterns and directories are.

    A path is a `.txt` or `.tsv` file, also with `.gz` or `.xz`, a pattern, a
    directory of such files, or `tfds:NAME[SPLIT]`. Files come as given, and in
    natural order (part-9 before part-10) within a pattern or directory.
    """
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    found: list[Any] = []
    for path in paths:
        if str(path).startswith(data_files.PREFIX):
            name = str(path).removeprefix(data_files.PREFIX)
            found.append(PreparedSource(name))
        else:
            found += map(Source, _expand(pathlib.Path(path)))
    data_files.check_names([source.name for source in found])
    return found


def _expand(path: pathlib.Path) -> list[pathlib.Path]:
    is_dir = path.is_dir()
    given = (
        path.iterdir() if is_dir else map(pathlib.Path, glob.glob(str(path)))
    )
    files = [one for one in [path] if one.is_file()] or [
        one for one in given if one.is_file()
    ]
    known = [one for one in files if one.name.endswith(_SUFFIXES)]
    if not known or (len(known) < len(files) and not is_dir):
        others = [one.name for one in files if one not in known]
        raise ValueError(
            f"`path` must stand for files ({', '.join(_SUFFIXES)}); received "
            f"{str(path)!r}, which stands for "
            f"{f'{others[0]!r}' if others else 'no file'}. Set `path` to where "
            "the text is."
        )
    return sorted(known, key=data_files.natural_order)


# IMP
