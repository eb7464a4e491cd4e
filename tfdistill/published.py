"""The newest version of each group in an exchange, for those who only look.

Manifests are read and no file beside them; nothing is verified, so that a look
costs one small file a group. A storage that hangs must not stop who looks at
it: `PublishedWatch` asks it in a thread of its own.
"""

import dataclasses
import os
import re
import threading
import time
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Protocol

from tfdistill import local_filesystem
from tfdistill import manifest
from tfdistill import plain_text
from tfdistill import version_names

_GROUP_DIR = re.compile(r"group_(0|[1-9][0-9]{0,5})")
# Broken versions that are passed over in search of a good one.
_MAX_LOOKS = 5


class Storage(Protocol):
    """What is asked of a storage; see `filesystem.FileSystem`."""

    def list_dir(self, path: str) -> list[str]:
        """Returns the names in a directory."""

    def stat(self, path: str) -> local_filesystem.Stat:
        """Returns what is known of a path."""

    def blocks(self, path: str) -> Iterator[bytes]:
        """Yields the content of a file."""


def local_storage(root: str) -> tuple[Storage, str]:
    """Returns the storage of a directory, and the directory made absolute."""
    return local_filesystem.LocalFileSystem(), os.path.abspath(root)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """The newest version of a group.

    Attributes:
        step: Its number.
        num_bytes: Of its files, by its manifest.
        created: When it was published, in Unix seconds of the publisher.
        modified: When the storage saw it, in Unix seconds of the storage; 0
            where it does not tell.
        broken: Newer versions whose manifests cannot be read.
    """

    step: int
    num_bytes: int
    created: float
    modified: float
    broken: tuple[int, ...] = ()


def newest(file_system: Storage, root: str, group: int) -> Published | None:
    """Returns the newest version of a group whose manifest is a valid one.

    Args:
        file_system: Where the exchange is.
        root: Its directory there.
        group: Index of the group.

    Raises:
        OSError: If the storage fails.
    """
    path = f"{root}/group_{group}"
    try:
        names = file_system.list_dir(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    steps = [
        s for name in names if (s := version_names.step_of(name)) is not None
    ]
    broken: list[int] = []
    for step in sorted(steps, reverse=True):
        try:
            return _read(file_system, path, step, tuple(broken))
        except (FileNotFoundError, NotADirectoryError):
            continue  # Not committed yet, or pruned meanwhile.
        except (manifest.ManifestError, local_filesystem.NotRegularFileError):
            broken.append(step)
            if len(broken) >= _MAX_LOOKS:
                break
    return None


def _read(
    file_system: Storage,
    path: str,
    step: int,
    broken: tuple[int, ...],
) -> Published:
    name = f"{path}/{step}/{manifest.FILE_NAME}"
    modified = file_system.stat(name).modified
    text = b""
    for block in file_system.blocks(name):
        text += block
        if len(text) > manifest.MAX_BYTES:
            break  # Refused for its length.
    found = manifest.Manifest.from_json(text)
    return Published(
        step=step,
        num_bytes=sum(entry.size for entry in found.files.values()),
        created=float(found.created),
        modified=modified,
        broken=broken,
    )


OpenStorage = Callable[[str], tuple[Storage, str]]


class PublishedWatch:
    """Looks into an exchange again and again, without making anyone wait.

    Attributes:
        problem: Why the last look failed; empty where it did not.
    """

    def __init__(
        self,
        root: str,
        *,
        interval_secs: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        open_storage: OpenStorage = local_storage,
        must_be_there: bool = False,
    ) -> None:
        """Touches no storage yet.

        Args:
            root: The exchange, a directory or URL.
            interval_secs: Least seconds between two looks. Default 2.
            clock: Seconds of a clock that never goes backwards.
            open_storage: Finds the storage of a root. Default: of a local one;
                `filesystem.for_root` knows URLs, too.
            must_be_there: Whether it is a `problem` that there is no such
                directory. Default False: the first version makes it.
        """
        self.problem = ""
        self._root = root
        self._interval_secs = interval_secs
        self._clock = clock
        self._open_storage = open_storage
        self._must_be_there = must_be_there
        self._thread: threading.Thread | None = None
        self._began = -float("inf")
        self._found: Mapping[int, Published] = {}
        self._groups: Collection[int] = ()

    @property
    def groups(self) -> Collection[int]:
        """The groups that the last look has seen in the exchange."""
        return self._groups

    def look(
        self, groups: Collection[int], *, limit_secs: float = 0.0
    ) -> Mapping[int, Published]:
        """Returns what the last look has found, and starts one if it is due.

        Args:
            groups: Groups to look for, besides those that are there.
            limit_secs: Seconds to wait for the present look. Default 0.
        """
        now = self._clock()
        running = self._thread is not None and self._thread.is_alive()
        if not running and now - self._began >= self._interval_secs:
            self._began = now
            self._thread = threading.Thread(
                target=self._look, args=(list(groups),), daemon=True
            )
            self._thread.start()
        if limit_secs and self._thread is not None:
            self._thread.join(limit_secs)
        if self._thread is not None and self._thread.is_alive():
            waited = self._clock() - self._began
            if waited >= (limit_secs or self._interval_secs):
                self.problem = (
                    f"{self._root} has not answered for {waited:.0f} s"
                )
        return dict(self._found)

    def _look(self, wanted: Collection[int]) -> None:
        try:
            storage, root = self._open_storage(self._root)
            there = _groups_there(
                storage, root, must_be_there=self._must_be_there
            )
            found = {}
            for group in sorted({*wanted, *there}):
                version = newest(storage, root, group)
                if version is not None:
                    found[group] = version
        except (ImportError, OSError, ValueError) as error:
            self.problem = plain_text.one_line(f"{self._root}: {error}")
            return
        self._groups, self._found, self.problem = there, found, ""


def _groups_there(
    storage: Storage, root: str, *, must_be_there: bool
) -> list[int]:
    try:
        names = storage.list_dir(root)
    except (FileNotFoundError, NotADirectoryError):
        if must_be_there:
            raise
        return []
    matches = (_GROUP_DIR.fullmatch(name) for name in names)
    return sorted(int(match[1]) for match in matches if match)
