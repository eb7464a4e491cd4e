"""Where a version is put together out of sight, and how it comes into sight."""

import hashlib
import logging
import tempfile
from collections.abc import Callable

from tfdistill import filesystem
from tfdistill import group_claim
from tfdistill import manifest
from tfdistill import retention

_log = logging.getLogger(__name__)


class Staging:
    """A temporary directory that becomes a version, or leaves no trace.

    Where directories can be renamed it lies beside the version, so that one
    rename publishes it. Elsewhere it is a local directory (`TMPDIR` says
    where), copied file by file with the manifest last.

    Attributes:
      path: The directory.
    """

    def __init__(
        self,
        file_system: filesystem.FileSystem,
        final: str,
        *,
        incarnation: str,
    ) -> None:
        """Makes the directory.

        Args:
          file_system: Where the version goes.
          final: The directory of the version.
          incarnation: Marks the directory as this publisher's.
        """
        self._target = file_system
        self._final = final
        self._parent, _, name = final.rpartition("/")
        self._source: filesystem.FileSystem = filesystem.LocalFileSystem()
        if file_system.renames_atomically:
            self._source = file_system
            self.path = f"{self._parent}/.tmp-{name}-{incarnation}"
            file_system.remove_tree(self.path)
            file_system.make_dirs(self.path)
        else:
            self.path = tempfile.mkdtemp(prefix="tfdistill-export-")

    def files(self) -> dict[str, manifest.FileEntry]:
        """Returns size and checksum of each file, by path, and syncs them.

        Raises:
          NotRegularFileError: For a link, pipe or device.
          ManifestError: For a name that no manifest can hold.
        """
        entries = {}
        directories = [self.path]
        for name, found in filesystem.walk(self._source, self.path):
            path = f"{self.path}/{name}"
            if found.is_dir:
                directories.append(path)
                continue
            manifest.check_file_name(name)
            entries[name] = checksum(self._source, path)
            self._sync(path)
        for directory in reversed(directories):
            self._sync(directory)
        return entries

    def commit(
        self, checked: manifest.Manifest, *, confirm: Callable[[], None]
    ) -> None:
        """Makes the version visible.

        Args:
          checked: The manifest, with the entries that `files` returned.
          confirm: Called before anything in sight is changed, at last right
            before the version comes into sight. What it raises ends the
            publication; after a `ClaimLostError` nothing in sight is touched.
        """
        text = checked.to_json().encode()
        confirm()
        self._clear()
        if self._source is self._target:
            self._target.write(f"{self.path}/{manifest.FILE_NAME}", [text])
            self._sync(self.path)
            confirm()
            if retention.move(self._target, self.path, self._final):
                self._sync_parent()
                return
        try:
            for name in sorted(checked.files):
                blocks = self._source.blocks(f"{self.path}/{name}")
                self._target.write(f"{self._final}/{name}", blocks)
            confirm()
            self._target.write(f"{self._final}/{manifest.FILE_NAME}", [text])
        except group_claim.ClaimLostError:
            raise  # What lies there may be the new owner's by now.
        except BaseException:
            self._take_back()
            raise

    def discard(self) -> None:
        """Removes the temporary directory if it is still there."""
        try:
            self._source.remove_tree(self.path)
        except OSError as error:
            _log.warning("Could not remove %s: %s", self.path, error)

    def _clear(self) -> None:
        try:
            found = self._target.stat(self._final)
        except FileNotFoundError:
            return
        if not found.is_dir:
            raise NotADirectoryError(
                f"{self._final} must be absent or a directory, and is neither."
            )
        retention.remove_version(self._target, self._final)

    def _take_back(self) -> None:
        try:
            retention.remove_version(self._target, self._final)
        except OSError as error:
            _log.warning("Could not remove %s: %s", self._final, error)

    def _sync(self, path: str) -> None:
        # What is copied from here need not survive a crash itself.
        if self._source is self._target:
            self._source.sync(path)

    def _sync_parent(self) -> None:
        try:
            self._target.sync(self._parent)
        except OSError as error:
            # Readers see the version by now: it can no longer fail.
            _log.warning("Could not sync %s: %s", self._parent, error)


def checksum(
    file_system: filesystem.FileSystem,
    path: str,
    *,
    max_bytes: int | None = None,
) -> manifest.FileEntry:
    """Returns the number of bytes in a file and their SHA-256.

    Args:
      file_system: Where the file is.
      path: Its path.
      max_bytes: Reading stops at the first block beyond it. Default: no limit.
    """
    digest = hashlib.sha256()
    size = 0
    for block in file_system.blocks(path):
        digest.update(block)
        size += len(block)
        if max_bytes is not None and size > max_bytes:
            break
    return manifest.FileEntry(size, digest.hexdigest())
