"""Writes tokens to files: the documents of one split, one behind the other."""

import array
import pathlib
from types import TracebackType

import numpy as np

__all__ = ["Stream", "dtype_of"]


def dtype_of(vocabulary_size: int) -> np.dtype:
    """Returns the smallest of uint16 and int32 that holds the tokens."""
    return np.dtype("<u2" if vocabulary_size <= 1 << 16 else "<i4")


class Stream:
    """Takes the documents of one split.

    Attributes:
        num_tokens: So many so far.
    """

    def __init__(
        self, path: pathlib.Path, dtype: np.dtype, *, limit: int | None
    ) -> None:
        """Begins a file.

        Args:
            path: Of the file to write.
            dtype: Of a token there.
            limit: Takes only so many tokens; None for all.
        """
        self.num_tokens = 0
        self._dtype, self._limit = dtype, limit
        self._path = path
        self._file = path.open("wb")
        self._ends = array.array("q")
        self._draws = array.array("Q")

    def __enter__(self) -> "Stream":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    @property
    def is_full(self) -> bool:
        """Whether the limit was reached."""
        return self._limit is not None and self.num_tokens >= self._limit

    def add(self, tokens: list[int], *, draw: int) -> None:
        """Takes a document, or as much of it as there is room for."""
        if self._limit is not None:
            tokens = tokens[: self._limit - self.num_tokens]
        if not tokens:
            return
        self._file.write(np.asarray(tokens, self._dtype).tobytes())
        self.num_tokens += len(tokens)
        self._ends.append(self.num_tokens)
        self._draws.append(draw)

    def sort(self) -> np.ndarray:
        """Closes the file, with the documents in the order of their draws.

        Whatever order the files had, by label say, any part of the new one is
        a sample of all.

        Returns:
            int64 `[documents]`: where each document ends.
        """
        self._file.close()
        ends = np.frombuffer(self._ends, np.int64)
        starts = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
        order = np.argsort(np.frombuffer(self._draws, np.uint64), kind="stable")
        if not len(order):
            return ends
        unsorted = np.memmap(self._path, self._dtype, "r")
        aside = self._path.with_suffix(".sorted")
        with aside.open("wb") as file:
            for document in order.tolist():
                tokens = unsorted[starts[document] : ends[document]]
                file.write(tokens.tobytes())
        aside.replace(self._path)
        return np.cumsum((ends - starts)[order])
