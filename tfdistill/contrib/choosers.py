"""Which changes of dense weights a delta sends first.

For `StudentExporter(key_every=10, choose=...)`. What they leave out is offered
again with the next version, and a whole version has everything.
"""

import numpy as np


class TopOfChunks:
    """Picks the largest element of each chunk (ScaleCom, arXiv:2104.11125).

    Chen et al. select by the new change plus the residue, which passes a
    low-pass filter: what enters it counts `low_pass` times, so that the noise
    of large learning rates does not add up. Here the filter decides only what
    is picked. What is sent is the value itself, so the residue stays exact.

    Args:
        chunk: Elements a chunk, >= 1. Default 64.
        low_pass: What an older change counts, in (0, 1]. Default 0.5.

    Example:
        >>> TopOfChunks(chunk=3)(np.array([1., 3, -2, 0, 0]), np.zeros(5))
        array([1])
    """

    def __init__(self, *, chunk: int = 64, low_pass: float = 0.5) -> None:
        if chunk < 1 or not 0 < low_pass <= 1:
            raise ValueError(
                "`chunk` must be >= 1 and `low_pass` in (0, 1]; received "
                f"{chunk} and {low_pass}."
            )
        self._chunk, self._low_pass = chunk, low_pass

    def __call__(self, values: np.ndarray, residue: np.ndarray) -> np.ndarray:
        """Returns the indices to send."""
        scores = _in_bins(values + self._low_pass * residue, self._chunk)
        first = np.arange(len(scores)) * self._chunk
        return (first + scores.argmax(axis=1))[scores.max(axis=1) > 0]


class LocalMaximum:
    """Picks what may exceed its bin's maximum (AdaComp, arXiv:1712.02679).

    Chen et al. send an element with the new change d and the residue r if
    |r + 2 d| reaches the largest |r + d| of its bin: more where many change
    much, and little else. Here values go, not their signs and a scale.

    Args:
        bin_size: Elements a bin, >= 1. Default 500.

    Example:
        >>> LocalMaximum(bin_size=4)(np.array([0., 2, 1, 0]), np.zeros(4))
        array([1, 2])
    """

    def __init__(self, *, bin_size: int = 500) -> None:
        if bin_size < 1:
            raise ValueError(f"`bin_size` must be >= 1; received {bin_size}.")
        self._bin_size = bin_size

    def __call__(self, values: np.ndarray, residue: np.ndarray) -> np.ndarray:
        """Returns the indices to send."""
        ahead = _in_bins(residue + 2 * values, self._bin_size)
        owed = _in_bins(residue + values, self._bin_size)
        largest = owed.max(axis=1, keepdims=True)
        return np.flatnonzero((ahead >= largest) & (largest > 0))


def _in_bins(values: np.ndarray, size: int) -> np.ndarray:
    """Returns the magnitudes as `[bins, size]`, with -1 after the last."""
    padding = 0, -len(values) % size
    return np.pad(np.abs(values), padding, constant_values=-1).reshape(-1, size)
