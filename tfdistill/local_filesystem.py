"""The file operations the exchange needs, on local disks and mounts.

`tfdistill.filesystem` has them for URLs, too, and says what each must do; this
part needs no TensorFlow to be installed.
"""

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterable
from collections.abc import Iterator
from typing import NamedTuple

from tfdistill import whole_file

BLOCK_BYTES = 4 * 1024 * 1024


class NotRegularFileError(OSError):
    """A link, directory, pipe or device where a file must be."""


class Stat(NamedTuple):
    """What is known of a path; links are neither directories nor files.

    Attributes:
      is_dir: Whether it is a directory.
      is_file: Whether it is a regular file.
      size: Length of a file in bytes.
      modified: Last change in seconds by the storage's own clock, or 0.0.
    """

    is_dir: bool
    is_file: bool
    size: int
    modified: float


class LocalFileSystem:
    """Local disks and whatever is mounted like one."""

    renames_atomically = True

    def list_dir(self, path: str) -> list[str]:
        """See `filesystem.FileSystem`."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            return os.listdir(descriptor)
        finally:
            os.close(descriptor)

    def stat(self, path: str) -> Stat:
        """See `filesystem.FileSystem`."""
        found = os.lstat(path)
        return Stat(
            stat.S_ISDIR(found.st_mode),
            stat.S_ISREG(found.st_mode),
            found.st_size,
            found.st_mtime,
        )

    def blocks(self, path: str) -> Iterator[bytes]:
        """See `filesystem.FileSystem`."""
        # Without O_NONBLOCK, opening a pipe would wait for its other end.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            descriptor = os.open(path, flags)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise NotRegularFileError(errno.ELOOP, "a link", path) from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise NotRegularFileError(errno.EINVAL, "not a file", path)
        with open(descriptor, "rb", buffering=0) as file:
            while block := file.read(BLOCK_BYTES):
                yield block

    def write(self, path: str, blocks: Iterable[bytes]) -> None:
        """See `filesystem.FileSystem`."""
        self.make_dirs(os.path.dirname(path))
        whole_file.write(path, blocks)

    def sync(self, path: str) -> None:
        """See `filesystem.FileSystem`."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some mounts cannot sync a directory; they have nothing to sync.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(descriptor)

    def rename(self, source: str, target: str) -> None:
        """See `filesystem.FileSystem`."""
        os.rename(source, target)

    def make_dirs(self, path: str) -> None:
        """See `filesystem.FileSystem`."""
        os.makedirs(path, exist_ok=True)

    def remove(self, path: str) -> None:
        """See `filesystem.FileSystem`."""
        os.remove(path)

    def remove_tree(self, path: str) -> None:
        """See `filesystem.FileSystem`."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)
