"""A published version, the ways it can be bad, and how that is found out."""

import dataclasses
import hashlib
import logging
import operator
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from tfdistill.exchange import filesystem
from tfdistill.exchange import manifest as manifest_lib
from tfdistill.exchange import signing

_log = logging.getLogger(__name__)
_STEP = re.compile(r"0|[1-9][0-9]{0,12}")
# A thousand steps a second for thirty years: no training makes more.
MAX_STEP = 10**12


class ExportError(RuntimeError):
    """A version could not be published; its `__cause__` says why."""


def not_published(path: str, error: Exception) -> ExportError:
    """Returns what a publication fails with, whatever has failed in it."""
    why = f"{type(error).__name__}: {error}".rstrip(".")
    return ExportError(
        f"Could not publish {path}: {why}. No part of it is visible to readers."
    )


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


class PassedOver:
    """Warns of each version that is passed over, but not the first time.

    Then it may be about to come, or to go.
    """

    def __init__(self) -> None:
        self._times: Counter[tuple[int, int]] = Counter()

    def note(self, version: tuple[int, int], error: Exception) -> None:
        """Notes that the version of a group and a step is passed over."""
        self._times[version] += 1
        is_second = self._times[version] == 2
        level = logging.WARNING if is_second else logging.DEBUG
        _log.log(level, "Skipping a version: %s", error)


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


def read(
    file_system: filesystem.FileSystem,
    path: str,
    *,
    group: int,
    step: int,
    signer: signing.Signer | None,
) -> Version:
    """Reads the manifest of a version; see `VersionStore.open`."""
    try:
        for directory in (path.rpartition("/")[0], path):
            if not file_system.stat(directory).is_dir:
                raise NotADirectoryError("links are not followed")
        text = filesystem.read(
            file_system,
            f"{path}/{manifest_lib.FILE_NAME}",
            max_bytes=manifest_lib.MAX_BYTES,
        )
        found = manifest_lib.Manifest.from_json(text)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise VersionNotFoundError(
            f"There is no version at {path}: {error}. It wasn't published yet, "
            "or was pruned."
        ) from error
    except (
        manifest_lib.ManifestError,
        filesystem.NotRegularFileError,
    ) as error:
        raise IncompleteVersionError(
            f"{path}/{manifest_lib.FILE_NAME} must be a valid manifest: {error}"
        ) from error
    if (found.group, found.step) != (group, step) or not found.files:
        raise CorruptVersionError(
            f"The manifest of {path} must name its files, group {group} and "
            f"step {step}; received {len(found.files)} files, group "
            f"{found.group} and step {found.step}. Was it copied there?"
        )
    if signer is not None and (fault := signer.fault(found)):
        raise CorruptVersionError(
            f"The manifest of {path} cannot be trusted: {fault}"
        )
    return Version(group, step, path, found)


def fetch(
    file_system: filesystem.FileSystem, version: Version, directory: str
) -> Version:
    """Copies a version's files, and checks the copy."""
    check_listing(file_system, version)
    local = filesystem.LocalFileSystem()
    for name in version.manifest.files:
        blocks = file_system.blocks(f"{version.path}/{name}")
        local.write(f"{directory}/{name}", blocks)
    copy = dataclasses.replace(version, path=directory, is_copy=True)
    check_content(local, copy)
    return copy


def content(file_system: filesystem.FileSystem, version: Version) -> bytes:
    """Reads a version that is one file, and checks it."""
    found = bytearray()

    def keep(block: bytes) -> None:
        found.extend(block)
        if len(found) > version.num_bytes:
            raise CorruptVersionError(
                f"{version.path} must have {version.num_bytes} bytes by its "
                "manifest; it has more."
            )

    check_content(file_system, version, keep)
    return bytes(found)


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


def listed(file_system: filesystem.FileSystem, directory: str) -> list[int]:
    """Returns the steps of all that may be versions, by one call."""
    try:
        names = file_system.list_dir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    steps = map(step_of_name, names)
    return sorted(step for step in steps if step is not None)
