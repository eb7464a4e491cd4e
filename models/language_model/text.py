"""Reads documents of text from files: plain, gzip or xz, one on each line."""

import gzip
import lzma
import pathlib
import zlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from models import files as data_files

_FIELD = "text"
_COMPRESSIONS = ("", ".gz", ".xz")
_SUFFIXES = tuple(f"{k}{c}" for k in (".txt", ".tsv") for c in _COMPRESSIONS)
# In reviews of films, and in nothing that one reads.
_LINE_BREAK = "<br />"


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


class Source(data_files.File):
    """The documents of one file."""

    def __init__(self, path: pathlib.Path) -> None:
        """Reads nothing yet."""
        super().__init__(path)
        if not path.name.endswith(_SUFFIXES):
            raise ValueError(
                f"`path` must match text files ({', '.join(_SUFFIXES)}); it "
                f"matches {path.name!r}. Rename the file, or set `path` to the "
                "location of the text."
            )

    def documents(self) -> Iterator[str]:
        """Yields the documents in order, without blank ones.

        Bytes that are not UTF-8 become U+FFFD.
        """
        has_fields = ".tsv" in self.path.suffixes
        kinds: Any = {".gz": gzip.open, ".xz": lzma.open}
        unpack = kinds.get(self.path.suffix, open)
        how = {"encoding": "utf-8", "errors": "replace", "newline": "\n"}
        try:
            with unpack(self.path, "rt", **how) as lines:
                for text in lines:
                    if has_fields:
                        # Quotation marks are text: files are split at tabs.
                        text = text.rpartition("\t")[2]
                        text = text.replace(_LINE_BREAK, " ")
                    if text := text.strip():
                        yield text
        except (
            EOFError,
            gzip.BadGzipFile,
            lzma.LZMAError,
            zlib.error,
        ) as cause:
            raise ValueError(
                f"{self.name} must be a whole {self.path.suffix} file; "
                f"received a broken one ({cause}). Copy it again."
            ) from cause


def sources(paths: data_files.Paths) -> list[Any]:
    """Returns where the documents of files, patterns and directories are."""
    return data_files.sources(
        paths,
        patterns=[f"*{suffix}" for suffix in _SUFFIXES],
        file=Source,
        prepared=PreparedSource,
    )
