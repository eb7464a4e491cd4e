"""The paragraphs of Common Crawl that Anil et al. 2018 have trained on.

`python -m models.language_model.paper_split IDS.csv FILE.wet.gz OUT.txt.gz`
writes the paper's paragraphs of one file, one on each line, as recipes of
language models read them (`--override=path=OUT.txt.gz`).

github.com/google-research/google-research/tree/master/codistillation links to
the ids: CSV files of a file's name and its paragraphs, each id less the one
before it. It does not say what a paragraph is. Here it is a line of text that
is not blank, counted from 0 over all records of a WET file. Tested with files
as described; the 392 MB of the original were not available.
"""

import csv
import gzip
import pathlib
import re
import sys
from collections.abc import Iterator

import numpy as np

_MOST_CHARACTERS = 2**31 - 1


def paragraph_ids(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the ids, int64 and in order, by the name of each file."""
    csv.field_size_limit(_MOST_CHARACTERS)
    with path.open(newline="", encoding="utf-8") as file:
        found = {
            row[0]: re.findall(r"-?\d+", row[1]) for row in csv.reader(file)
        }
    return {
        name: np.cumsum(np.array(deltas, np.int64))
        for name, deltas in found.items()
        if deltas  # The first line may name the columns.
    }


def paragraphs(path: pathlib.Path) -> Iterator[str]:
    """Yields the lines of text of a WET file, in order."""
    with gzip.open(path, "rb") as file:
        fields: dict[bytes, bytes] = {}
        while line := file.readline():
            name, _, value = line.partition(b":")
            if line.strip():
                fields[name.strip().lower()] = value.strip()
                continue
            body = file.read(int(fields.get(b"content-length", 0)))
            if fields.get(b"warc-type") == b"conversion":
                text = body.decode("utf-8", "replace").split("\n")
                yield from filter(None, map(str.strip, text))
            fields = {}


def main(arguments: list[str]) -> int:
    """Writes the paper's paragraphs of one file; returns the exit code."""
    ids_path, source, target = map(pathlib.Path, arguments)
    found = {
        pathlib.PurePath(name).name: ids
        for name, ids in paragraph_ids(ids_path).items()
    }
    if source.name not in found:
        print(f"{ids_path} has no paragraphs of {source.name}", file=sys.stderr)
        return 1
    wanted = set(found[source.name].tolist())
    with gzip.open(target, "wt", encoding="utf-8") as output:
        for number, text in enumerate(paragraphs(source)):
            if number in wanted:
                wanted.remove(number)
                output.write(f"{text}\n")
    if wanted:
        print(f"{source} has no {len(wanted)} of the ids", file=sys.stderr)
    return 1 if wanted else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
