"""Deltas: the rows that changed since a key frame, and how they are put in.

A key frame is a whole version. A delta belongs to one key frame and holds the
rows of each variable that have changed since: their values, not the changes.
Written over the rows of the frame, or of any version between, they give the
delta's version. So a reader needs one delta, and a lost delta costs nothing. A
row that changed back is sent as well: a reader may hold what it was.

A delta may have a base instead: the values of the variables that it does not
name, which never change; exchange/bases.py. It then is one from zeros, and
needs no frame.

Arrays are bytes here, whatever their dtype. A row is what one index of the
first axis holds, and a scalar is one row. Needs NumPy only.
"""

import hashlib
import math
import zlib
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Mapping
from concurrent import futures
from typing import Any

import numpy as np

from tfdistill.exchange import manifest

# In a manifest's `extras`: what a delta holds; and, for key frames too, how
# often key frames come.
FIELD, KEY_EVERY_FIELD = "delta", "key_every"
# In a delta's field: the name of its base.
BASE = "base"
FILE_NAME = "delta.bin"

# Words of a variable compared at a time: they stay in the processor's cache.
_BLOCK_WORDS = 2**14

# From a variable's changes since the previous version, and the changes that
# versions have left out until then, both flat, to the indices to send.
Chooser = Callable[[np.ndarray, np.ndarray], np.ndarray]


class DeltaError(ValueError):
    """A delta that contradicts itself, or gives another result than it says."""


def is_delta(found: manifest.Manifest) -> bool:
    """Whether a manifest is a delta's."""
    return FIELD in found.extras


def frame_of(found: manifest.Manifest) -> int | None:
    """Returns the step of the key frame of a version of such a group."""
    if not is_delta(found):
        return found.step if KEY_EVERY_FIELD in found.extras else None
    field = found.extras[FIELD]
    frame = field.get("frame") if isinstance(field, Mapping) else None
    return frame if type(frame) is int else None


def base_of(found: manifest.Manifest) -> str | None:
    """Returns the name of a delta's base; None if it has a frame instead."""
    field = found.extras.get(FIELD)
    base = field.get(BASE) if isinstance(field, Mapping) else None
    return base if isinstance(base, str) else None


class Encoder:
    """Makes the deltas of one key frame.

    Attributes:
      frame: The step of the key frame.
      num_deltas: How many it has made.
    """

    def __init__(
        self,
        frame: int,
        values: Mapping[str, np.ndarray],
        *,
        choose: Chooser | None = None,
        chosen: Collection[str] = (),
    ) -> None:
        """Takes the frame's step and its values, which must not change.

        Deltas of the variables in `chosen` hold only the elements that `choose`
        picks; other elements stay as published. Without `choose`, every change
        is sent.
        """
        self.num_deltas = 0
        self.frame, self._choose = frame, choose
        self._base = {name: _rows(value) for name, value in values.items()}
        names = chosen if choose else ()
        self._last = {name: values[name].reshape(-1) for name in names}
        self._sent = {name: value.copy() for name, value in self._last.items()}
        self._touched: dict[str, Any] = dict.fromkeys(values, False)

    def encode(
        self, values: Mapping[str, np.ndarray], *, everything: bool = False
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Returns a delta's field of the manifest, and its file in blocks.

        With `everything`, nothing is left out, as of the next key frame.
        """
        self.num_deltas += 1
        entries, blocks = {}, []
        # The hash takes about as long as all else, and needs no lock of Python.
        with futures.ThreadPoolExecutor(1) as hashing:
            for name in sorted(values):
                if name in self._sent:
                    new = values[name].reshape(-1)
                    changed = self._send(name, new, everything)
                    rows = _rows(self._sent[name])
                    digest = hashing.submit(hashlib.sha256, rows.data)
                else:
                    rows = _rows(values[name])
                    digest = hashing.submit(hashlib.sha256, rows.data)
                    changed = _differ(rows, self._base[name])
                touched = self._touched[name] = self._touched[name] | changed
                bits = index_of(touched, level=1)
                blocks += [bits, rows[touched].tobytes()]
                entries[name] = {
                    "of": len(rows),
                    "rows": int(np.count_nonzero(touched)),
                    "index": len(bits),
                    "sha256": digest.result().hexdigest(),
                }
        return {"frame": self.frame, "variables": entries}, blocks

    def _send(self, name: str, new: np.ndarray, everything: bool) -> np.ndarray:
        """Publishes the chosen elements; returns which those were."""
        choose: Any = self._choose
        last, sent = self._last[name], self._sent[name]
        now, before, known = (v.astype(np.float32) for v in (new, last, sent))
        if everything:
            changed = _differ(_rows(new), _rows(sent))
        else:
            changed = np.zeros(new.shape, bool)
            changed[choose(now - before, before - known)] = True
        self._last[name], sent[changed] = new, new[changed]
        return changed


def index_of(chosen: np.ndarray, *, level: int) -> bytes:
    """Packs which of many were chosen: a bit each, deflated at a level."""
    return zlib.compress(np.packbits(chosen).tobytes(), level)


def chosen_by(index: bytes | memoryview, num: int) -> np.ndarray:
    """Returns which of `num` an index names; ValueError if it is wrong."""
    num_bytes = math.ceil(num / 8)
    try:
        # Never more bits than there are, however far they would unfold.
        bits = zlib.decompressobj().decompress(index, num_bytes or 1)
    except zlib.error as error:
        raise ValueError(
            f"its index isn't valid deflate data: {error}"
        ) from None
    if len(bits) != num_bytes:
        raise ValueError(f"its index must have {num} entries.")
    return np.unpackbits(np.frombuffer(bits, np.uint8), count=num).view(bool)


def patched(
    field: Mapping[str, Any], content: bytes, held: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Returns a delta's version, from one of the same key frame that is held.

    In the shapes and dtypes of the delta's manifest. DeltaError if the delta
    contradicts itself, or a result is another than the publisher had.
    """
    entries = field.get("variables")
    if not isinstance(entries, Mapping) or entries.keys() != held.keys():
        raise DeltaError("its delta must name all of its variables.")
    results, rest = {}, memoryview(content)
    for name in sorted(held):
        results[name] = np.array(held[name], order="C")
        try:
            rest = _write_over(results[name], entries[name], rest)
        except (KeyError, TypeError, ValueError) as error:
            raise DeltaError(
                f"its delta of {name} is invalid: {error}"
            ) from error
    if rest:
        raise DeltaError(f"its delta must end; {len(rest)} bytes are left.")
    return results


def _write_over(
    value: np.ndarray, entry: Mapping[str, Any], content: memoryview
) -> memoryview:
    """Writes a variable's changed rows over it; returns what is after them."""
    numbers = [entry[key] for key in ("of", "rows", "index")]
    if not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"{numbers} must be whole numbers >= 0.")
    num_rows, num_changed, index = numbers
    if num_rows not in (len(_rows(value)), value.size):
        raise ValueError(f"it has no {num_rows} rows.")
    rows = _rows(value, num_rows)
    touched = chosen_by(content[:index], num_rows)
    end = index + num_changed * rows.shape[1] * rows.itemsize
    new = np.frombuffer(content[index:end], rows.dtype)
    rows[touched] = new.reshape(num_changed, rows.shape[1])
    # The hash of what is returned, not of a view of it.
    result = hashlib.sha256(_rows(value).data).hexdigest()
    if result != entry["sha256"]:
        raise ValueError("the result must have the SHA-256 of its manifest.")
    return content[end:]


def _differ(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Returns which rows are not the same, a block of them at a time."""
    size = max(_BLOCK_WORDS // max(rows.shape[1], 1), 1)
    found = np.empty(len(rows), bool)
    for i in range(0, len(rows), size):
        part = slice(i, i + size)
        (rows[part] != others[part]).any(axis=1, out=found[part])
    return found


def _rows(value: np.ndarray, num_rows: int | None = None) -> np.ndarray:
    """Views an array as rows of few words each, which compare fast."""
    if num_rows is None:
        num_rows = len(value) if value.ndim else 1
    flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    width = flat.size // max(num_rows, 1)
    word = math.gcd(width, 8)
    return flat.view(f"u{word}").reshape(num_rows, width // word)
