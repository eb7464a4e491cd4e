"""The few file operations the exchange needs, on local disks and by URL.

Failures of either kind surface as `OSError`, so that callers need not know
which one they talk to. TensorFlow is imported only for URLs.
"""

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Iterable
from collections.abc import Iterator
from typing import NamedTuple
from typing import Protocol

from tfdistill.system import run_files

BLOCK_BYTES = 4 * 1024 * 1024
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://+[^/]")
_NEARLY_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
# What mounts without a rename of directories answer: other devices, gcsfuse.
NO_RENAME = frozenset(
    {errno.EXDEV, errno.ENOTSUP, errno.ENOSYS, errno.EMFILE, errno.EPERM}
)


class NotRegularFileError(OSError):
    """A link, directory, pipe or device where a file must be."""


class Stat(NamedTuple):
    """What is known of a path; links are neither directories nor files."""

    is_dir: bool
    is_file: bool
    size: int
    # In seconds by the storage's own clock, or 0.0.
    modified: float


class FileSystem(Protocol):
    """Operations of a storage. Every failure is an OSError."""

    # Whether `rename` moves a directory as a whole.
    renames_atomically: bool

    def list_dir(self, path: str) -> list[str]:
        """Returns the names in the directory, which must not be a link."""

    def stat(self, path: str) -> Stat:
        """Returns what is known of `path`."""

    def blocks(self, path: str) -> Iterator[bytes]:
        """Yields the content of a regular file."""

    def write(self, path: str, blocks: Iterable[bytes]) -> None:
        """Writes a file, which appears whole and durable, and its parents."""

    def sync(self, path: str) -> None:
        """Makes a file's content, or a directory's names, durable."""

    def rename(self, source: str, target: str) -> None:
        """Moves `source` to `target`: an absent name, or for a file a file."""

    def make_dirs(self, path: str) -> None:
        """Makes the directory and its missing parents."""

    def remove(self, path: str) -> None:
        """Removes one file."""

    def remove_tree(self, path: str) -> None:
        """Removes a directory and all it holds; fine if there is none."""


class LocalFileSystem:
    """Local disks and whatever is mounted like one."""

    renames_atomically = True

    def list_dir(self, path: str) -> list[str]:
        """See `FileSystem`."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            return os.listdir(descriptor)
        finally:
            os.close(descriptor)

    def stat(self, path: str) -> Stat:
        """See `FileSystem`."""
        found = os.lstat(path)
        return Stat(
            stat.S_ISDIR(found.st_mode),
            stat.S_ISREG(found.st_mode),
            found.st_size,
            found.st_mtime,
        )

    def blocks(self, path: str) -> Iterator[bytes]:
        """See `FileSystem`."""
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
        """See `FileSystem`."""
        self.make_dirs(os.path.dirname(path))
        run_files.write(path, blocks)

    def sync(self, path: str) -> None:
        """See `FileSystem`."""
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
        """See `FileSystem`."""
        os.rename(source, target)

    def make_dirs(self, path: str) -> None:
        """See `FileSystem`."""
        os.makedirs(path, exist_ok=True)

    def remove(self, path: str) -> None:
        """See `FileSystem`."""
        os.remove(path)

    def remove_tree(self, path: str) -> None:
        """See `FileSystem`."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)


class GFileSystem:
    """Any scheme that `tf.io.gfile` knows, such as `gs://`.

    Directories are never renamed here: TensorFlow answers that `gs://` can do
    so atomically, and a rename within `ram://` drops the directory's files.
    """

    renames_atomically = False

    def __init__(self, scheme: str) -> None:
        """Imports TensorFlow."""
        import tensorflow as tf

        self._gfile = tf.io.gfile
        self._op_error = tf.errors.OpError
        self._kinds = {
            tf.errors.NOT_FOUND: errno.ENOENT,
            tf.errors.PERMISSION_DENIED: errno.EACCES,
            tf.errors.RESOURCE_EXHAUSTED: errno.ENOSPC,
        }
        schemes = [str(name) for name in self._gfile.get_registered_schemes()]
        if scheme not in schemes:
            # TensorFlow would take the URL for a path below the current one.
            raise ValueError(
                f"The scheme of an exchange must be one of "
                f"{sorted(filter(None, schemes))}; received {scheme!r}. Import "
                "the package that registers it (tensorflow_io for s3 and "
                "others) before the exchange is made."
            )

    def list_dir(self, path: str) -> list[str]:
        """See `FileSystem`."""
        with self._os_errors(path):
            return [name.rstrip("/") for name in self._gfile.listdir(path)]

    def stat(self, path: str) -> Stat:
        """See `FileSystem`."""
        with self._os_errors(path):
            found = self._gfile.stat(path)
        return Stat(
            bool(found.is_directory),
            not found.is_directory,
            found.length,
            found.mtime_nsec / 1e9,
        )

    def blocks(self, path: str) -> Iterator[bytes]:
        """See `FileSystem`."""
        with self._os_errors(path), self._gfile.GFile(path, "rb") as file:
            while block := file.read(BLOCK_BYTES):
                yield block

    def write(self, path: str, blocks: Iterable[bytes]) -> None:
        """See `FileSystem`."""
        self.make_dirs(path.rpartition("/")[0])
        with self._os_errors(path), self._gfile.GFile(path, "wb") as file:
            file.write(b"")  # Or a file without content is never made.
            for block in blocks:
                file.write(block)

    def sync(self, path: str) -> None:
        """Does nothing: a file is durable once it is closed."""

    def rename(self, source: str, target: str) -> None:
        """Refuses; see the class."""
        raise OSError(errno.ENOTSUP, "no atomic rename of", source)

    def make_dirs(self, path: str) -> None:
        """See `FileSystem`."""
        with self._os_errors(path):
            self._gfile.makedirs(path)

    def remove(self, path: str) -> None:
        """See `FileSystem`."""
        with self._os_errors(path):
            self._gfile.remove(path)

    def remove_tree(self, path: str) -> None:
        """See `FileSystem`."""
        with contextlib.suppress(FileNotFoundError), self._os_errors(path):
            self._gfile.rmtree(path)

    @contextlib.contextmanager
    def _os_errors(self, path: str) -> Iterator[None]:
        try:
            yield
        except self._op_error as error:
            number = self._kinds.get(error.error_code, errno.EIO)
            raise OSError(number, error.message, path) from error


def for_root(root: str | os.PathLike[str]) -> tuple[FileSystem, str]:
    """Returns the file system of a path or URL, and the root made absolute."""
    if not isinstance(root, str | os.PathLike) or not os.fspath(root):
        raise ValueError(
            "The root of an exchange must be a directory or a URL, as "
            f"text or pathlib.Path; received {root!r}."
        )
    text = os.fspath(root)
    if url := _URL.match(text):
        return GFileSystem(url[1]), text.rstrip("/")
    if _NEARLY_URL.match(text):
        raise ValueError(
            "A URL must have two slashes after its scheme, and a path; "
            f"received {text!r}. pathlib.Path folds slashes: pass a str."
        )
    return LocalFileSystem(), os.path.abspath(text)


def walk(file_system: FileSystem, root: str) -> Iterator[tuple[str, Stat]]:
    """Yields the path below `root` and the `Stat` of all that is in it."""
    pending = [""]
    while pending:
        parent = pending.pop()
        # A slash at the end would make the system follow a link.
        directory = f"{root}/{parent}".rstrip("/")
        for name in sorted(file_system.list_dir(directory)):
            found = file_system.stat(f"{root}/{parent}{name}")
            yield parent + name, found
            if found.is_dir:
                pending.append(f"{parent}{name}/")


def read(file_system: FileSystem, path: str, *, max_bytes: int) -> bytes:
    """Returns a file's content, or its start if it exceeds `max_bytes`."""
    content = bytearray()
    for block in file_system.blocks(path):
        content += block
        if len(content) > max_bytes:
            break
    return bytes(content)


def move(file_system: FileSystem, source: str, target: str) -> bool:
    """Renames a directory as a whole, or returns False if it cannot."""
    if not file_system.renames_atomically:
        return False
    try:
        file_system.rename(source, target)
    except OSError as error:
        if error.errno in NO_RENAME:
            return False
        raise
    return True
