"""Reads click logs by Arrow's parser, some thousand rows at a time.

A row has 40 columns with TABs between them: a label (0 or 1), 13 integers that
may be missing or negative, and 26 categories, which are any text and may be
missing too. Nothing is quoted. Memory is bounded.
"""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyarrow import csv

from models import files as data_files
from models.criteo import rows

_BLOCK_BYTES = 1 << 20
# Of a directory. A day_* file is one of Criteo's 1 TB log, in the same format.
_PATTERNS = ("*.tsv", "*.tsv.gz", "train.txt", "train.txt.gz", "day_*")
_READ = csv.ReadOptions(column_names=rows.SCHEMA.names, block_size=_BLOCK_BYTES)
_PARSE = csv.ParseOptions(delimiter="\t", quote_char=False)
_CONVERT = csv.ConvertOptions(
    column_types=rows.SCHEMA,
    null_values=[""],
    true_values=["1"],
    false_values=["0"],
)


class File(data_files.File):
    """A click log, which is unpacked if its name ends in .gz."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yields its rows in order, in the columns of `rows.SCHEMA`.

        A ValueError if there are other lines among them.
        """
        try:
            with csv.open_csv(
                self.path,
                read_options=_READ,
                parse_options=_PARSE,
                convert_options=_CONVERT,
            ) as reader:
                for batch in reader:
                    # A label, unlike all else, is never missing.
                    batch.validate(full=True)
                    if batch.column(0).null_count:
                        raise ValueError("a row has no label")
                    yield batch
        except (OSError, ValueError) as cause:
            raise ValueError(
                f"{self.name} must hold lines of 40 columns with TABs between "
                "them, that is a label 0 or 1, 13 integers and 26 categories; "
                "integers and categories may be empty. It cannot be read: "
                f"{cause}. Take other lines out, such as names of columns."
            ) from cause


def _prepared(name: str) -> Any:
    # It takes seconds to import, which files need not wait for.
    from models.criteo import tfds

    return tfds.Rows(name)


def sources(paths: data_files.Paths) -> list[Any]:
    """Returns where the rows of files, patterns and directories are."""
    return data_files.sources(
        paths, patterns=_PATTERNS, file=File, prepared=_prepared
    )
