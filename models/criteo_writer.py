"""Writes rows into part files of equal length."""

import pathlib

import numpy as np

__all__ = ["PART_ROWS", "Writer", "part_name"]

# Files of 1.3 MB: large enough to be read at full speed, small enough for a
# shuffle that takes some of them from anywhere.
PART_ROWS = 8192


def part_name(split: str, number: int) -> str:
    """Returns the name of a part file."""
    return f"{split}-{number:06d}.bin"


class Writer:
    """Collects rows of one split, and writes each part once it is full.

    Attributes:
        split: Name of the split.
    """

    def __init__(self, directory: pathlib.Path, split: str) -> None:
        """Writes nothing yet.

        Args:
            directory: Where the parts go.
            split: Beginning of their names.
        """
        self.split = split
        self._directory = directory
        self._rest: list[np.ndarray] = []
        self._num_rest = 0
        self._num_parts = 0
        self._num_rows = 0

    def add(self, records: np.ndarray) -> None:
        """Adds rows, `[rows, words]`."""
        self._rest.append(records)
        self._num_rest += len(records)
        self._num_rows += len(records)
        if self._num_rest < PART_ROWS:
            return
        joined = np.concatenate(self._rest)
        whole = len(joined) - len(joined) % PART_ROWS
        for first in range(0, whole, PART_ROWS):
            self._write(joined[first : first + PART_ROWS])
        self._rest, self._num_rest = [joined[whole:]], len(joined) - whole

    def finish(self) -> int:
        """Writes the last part; returns the number of rows in all."""
        if self._num_rest:
            self._write(np.concatenate(self._rest))
        return self._num_rows

    def _write(self, records: np.ndarray) -> None:
        path = self._directory / part_name(self.split, self._num_parts)
        path.write_bytes(np.ascontiguousarray(records, "<i4").data)
        self._num_parts += 1
