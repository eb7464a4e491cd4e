"""Bases: what versions have in common and no training changes, kept once.

A base is one file, `<root>/bases/<sha256>`, of values end to end. Its name is
the SHA-256 of its bytes, so no reader has to trust it, and groups that have the
same values share it. Versions name it in their manifests.
"""

import contextlib
import hashlib
import re
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdistill.exchange import commit
from tfdistill.exchange import filesystem
from tfdistill.exchange import versions

_NAME = re.compile(r"[0-9a-f]{64}")


def blocks(values: Mapping[str, np.ndarray]) -> list[Any]:
    """Returns the bytes of a base: by sorted key, each in C order."""
    flat = (np.ascontiguousarray(values[k]).reshape(-1) for k in sorted(values))
    return [value.view(np.uint8).data for value in flat]


def name_of(blocks: Iterable[Any]) -> str:
    """Returns the name of the base of these bytes, or views of bytes."""
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()


class Namer:
    """Names values, and looks again only at what may have changed.

    TensorFlow never writes to memory that other code holds. So values at the
    address of values that were named, and are still held, are the same.
    """

    def __init__(self) -> None:
        """Holds nothing."""
        self._held: list[np.ndarray] = []
        self._name = ""

    def name(self, values: Mapping[str, np.ndarray]) -> str:
        """Returns the name of the base that holds these values."""
        held = [values[key] for key in sorted(values)]
        if list(map(_place, held)) != list(map(_place, self._held)):
            self._held, self._name = held, name_of(blocks(values))
        return self._name


def _place(value: np.ndarray) -> tuple[int, int]:
    return value.ctypes.data, value.nbytes


class Bases:
    """The bases of an exchange. One process may publish what all name."""

    def __init__(
        self,
        file_system: filesystem.FileSystem,
        root: str,
        retention: commit.Retention,
        needed: Callable[[], Collection[str]],
    ) -> None:
        """Touches no storage.

        `needed` finds the names in the manifests of all groups.
        """
        self._file_system, self.root = file_system, f"{root}/bases"
        self._retention, self._needed = retention, needed
        self._has_published = False
        # Since when no version has named each.
        self._unnamed: dict[str, float] = {}

    def publish(self, name: str, blocks: Sequence[Any]) -> None:
        """Writes a base unless it is there; raises ExportError."""
        self._has_published = True
        path, size = f"{self.root}/{name}", sum(map(len, blocks))
        try:
            if not self._is_there(path, size):
                self._file_system.write(path, blocks)
        except OSError as error:
            # Another group may have written the same at the same time.
            with contextlib.suppress(OSError):
                if self._is_there(path, size):
                    return
            raise versions.ExportError(
                f"Could not publish the base {path}: {error}"
            ) from error

    def _is_there(self, path: str, size: int) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return self._file_system.stat(path)[1:] == (True, size)
        return False

    def read(self, name: str, num_bytes: int) -> bytes:
        """Reads a base of a known size.

        CorruptVersionError, which names it, if it is another;
        IncompleteVersionError if it is missing, or of another size.
        """
        if not _NAME.fullmatch(name):
            raise versions.CorruptVersionError(
                "The name of a base must be a SHA-256 in hexadecimal; received "
                f"{name[:80]!r}."
            )
        path, found = f"{self.root}/{name}", None
        with contextlib.suppress(
            FileNotFoundError, filesystem.NotRegularFileError
        ):
            found = filesystem.read(
                self._file_system, path, max_bytes=num_bytes
            )
        is_whole = found is not None and len(found) == num_bytes
        if found is None or not is_whole or name_of([found]) != name:
            state = (
                "is missing" if found is None else f"has {len(found)} others"
            )
            raise (
                versions.CorruptVersionError
                if is_whole
                else versions.IncompleteVersionError
            )(
                f"The base of the version, {path}, must be its {num_bytes} "
                f"bytes of frozen weights, named by their SHA-256; it {state}. "
                "If a base is missing, its group publishes it again with the "
                "next version. If all groups start with the same frozen "
                "weights, no group has to read a base."
            )
        return found

    def prune(self) -> None:
        """Removes what no version has named for long; one always stays.

        Only for a process that has published one.
        """
        names: list[str] = []
        if self._has_published:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                names = self._file_system.list_dir(self.root)
        if len(names) < 2:
            return
        unneeded = {*filter(_NAME.fullmatch, names)} - {*self._needed()}
        for name in self._retention.expired(self._unnamed, unneeded):
            with contextlib.suppress(FileNotFoundError):
                self._file_system.remove(f"{self.root}/{name}")
