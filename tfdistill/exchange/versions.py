"""A published version, the ways it can be bad, and how that is found out."""

import dataclasses
import hashlib
import operator
import re
from collections.abc import Callable
from typing import Any

from tfdistill.exchange import filesystem
from tfdistill.exchange import manifest as manifest_lib

_STEP = re.compile(r"0|[1-9][0-9]{0,12}")
# A thousand steps a second for thirty years: no training makes more.
MAX_STEP = 10**12


class ExportError(RuntimeError):
    """A version could not be published; its `__cause__` says why."""


class VersionExistsError(ExportError):
    """The version to publish is there already, and whole."""


class VersionNotFoundError(RuntimeError):
    """There is no such version, or it was deleted."""


class CorruptVersionError(RuntimeError):
    """A version differs from what its manifest says, or has none to trust."""


class IncompleteVersionError(CorruptVersionError):
    """Something of a version is not there, or not all of it: it may come."""


@dataclasses.dataclass(frozen=True)
class Version:
    """A published version: the SavedModel in `path`, local or a URL.

    `is_copy` if that is this process's own copy, which no other can see.
    `content` is what was read of a version that is one file.
    """

    group: int
    step: int
    path: str
    manifest: manifest_lib.Manifest = dataclasses.field(hash=False, repr=False)
    is_copy: bool = False
    content: bytes = dataclasses.field(default=b"", compare=False, repr=False)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(entry.size for entry in self.manifest.files.values())


def checksum(
    file_system: filesystem.FileSystem,
    path: str,
    keep: Callable[[bytes], Any] = lambda block: None,
) -> manifest_lib.FileEntry:
    """Returns the size and SHA-256 of a file, whose blocks `keep` gets."""
    digest = hashlib.sha256()
    size = 0
    for block in file_system.blocks(path):
        digest.update(block)
        size += len(block)
        keep(block)
    return manifest_lib.FileEntry(size, digest.hexdigest())


def check_listing(file_system: filesystem.FileSystem, version: Version) -> None:
    """Raises IncompleteVersionError unless names, kinds and sizes are right."""
    expected = {
        name: f"a file of {entry.size} bytes"
        for name, entry in version.manifest.files.items()
    }
    found = {}
    try:
        for name, seen in filesystem.walk(file_system, version.path):
            if seen.is_file:
                found[name] = f"a file of {seen.size} bytes"
            elif not seen.is_dir:
                found[name] = "a link or a device"
    except (FileNotFoundError, NotADirectoryError) as error:
        raise IncompleteVersionError(
            f"{version.path} changed while it was listed: {error}"
        ) from error
    found.pop(manifest_lib.FILE_NAME, None)
    for name in sorted(found.keys() | expected.keys()):
        wanted, received = (
            each.get(name, "absent") for each in (expected, found)
        )
        if wanted != received:
            raise IncompleteVersionError(
                f"{version.path}/{name} must be {wanted} by the manifest; it "
                f"is {received}."
            )


def check_content(
    file_system: filesystem.FileSystem,
    version: Version,
    keep: Callable[[bytes], Any] = lambda block: None,
) -> None:
    """Raises CorruptVersionError unless each file has its checksum.

    Each block that is read is given to `keep`.
    """
    for name, expected in version.manifest.files.items():
        path = f"{version.path}/{name}"
        try:
            received = checksum(file_system, path, keep)
        except (FileNotFoundError, filesystem.NotRegularFileError) as error:
            raise IncompleteVersionError(
                f"{path} must be a regular file: {error}"
            ) from error
        if received != expected:
            is_whole = received.size == expected.size
            kind = CorruptVersionError if is_whole else IncompleteVersionError
            raise kind(
                f"{path} must have {expected.size} bytes with SHA-256 "
                f"{expected.sha256} by its manifest; received "
                f"{received.size} bytes with {received.sha256}."
            )


def index(name: str, value: Any) -> int:
    """Returns `value` as an int, or raises ValueError naming `name`."""
    try:
        result = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        result = -1
    if not 0 <= result <= MAX_STEP:
        raise ValueError(
            f"`{name}` must be an integer in 0..10**12; received {value!r}."
        )
    return result


def step_of_name(name: str) -> int | None:
    """Returns the step that a directory name stands for, or None.

    Example:
        >>> [step_of_name(name) for name in ("1200", "012", ".tmp-12-a")]
        [1200, None, None]
    """
    step = int(name) if _STEP.fullmatch(name) else None
    return step if step is not None and step <= MAX_STEP else None
