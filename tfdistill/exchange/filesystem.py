"""The few file operations the exchange needs, on local disks and by URL.

Failures of any kind surface as `OSError`, so that callers need not know which
one they talk to. fsspec is imported only for URLs.
"""

import contextlib
import errno
import functools
import os
import re
import shutil
import stat
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any
from typing import NamedTuple
from typing import TypeAlias

from tfdistill.system import run_files

BLOCK_BYTES = 4 * 1024 * 1024
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://+[^/]")
_NEARLY_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
# Errors of mounts that cannot rename directories: other devices, gcsfuse.
_NO_RENAME = frozenset(
    {errno.EXDEV, errno.ENOTSUP, errno.ENOSYS, errno.EMFILE, errno.EPERM}
)


class NotRegularFileError(OSError):
    """A link, directory, pipe or device where a file must be."""


class Stat(NamedTuple):
    """What is known of a path; links are neither directories nor files."""

    is_dir: bool
    is_file: bool
    size: int


class LocalFileSystem:
    """Local disks and whatever is mounted like one."""

    # Whether `move` moves a directory as a whole, unless a mount refuses it.
    renames_atomically = True

    def list_dir(self, path: str) -> list[str]:
        """Returns the names in the directory, which must not be a link."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            return os.listdir(descriptor)
        finally:
            os.close(descriptor)

    def stat(self, path: str) -> Stat:
        """Returns what is known of `path`."""
        found = os.lstat(path)
        return Stat(
            stat.S_ISDIR(found.st_mode),
            stat.S_ISREG(found.st_mode),
            found.st_size,
        )

    def blocks(self, path: str) -> Iterator[bytes]:
        """Yields the content of a regular file."""
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
        """Writes a file, which appears whole and durable, and its parents."""
        self.make_dirs(os.path.dirname(path))
        run_files.write(path, blocks)

    def sync(self, path: str) -> None:
        """Makes a file's content, or a directory's names, durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some mounts cannot sync a directory; they have nothing to sync.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(descriptor)

    def move(self, source: str, target: str) -> bool:
        """Renames a directory as a whole, or returns False if it cannot."""
        try:
            os.rename(source, target)
        except OSError as error:
            if error.errno in _NO_RENAME:
                return False
            raise
        return True

    def make_dirs(self, path: str) -> None:
        """Makes the directory and its missing parents."""
        os.makedirs(path, exist_ok=True)

    def remove(self, path: str) -> None:
        """Removes one file."""
        os.remove(path)

    def remove_tree(self, path: str) -> None:
        """Removes a directory and all it holds; fine if there is none."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)


class ObjectStore:
    """Any URL that fsspec reads: the same operations on whole objects.

    Directories are the beginnings of names: none has to be made, and the last
    file takes its directory along. fsspec and the store's own client find the
    store's address and the credentials: in environment variables and
    configuration files.
    """

    renames_atomically = False

    def __init__(self, scheme: str) -> None:
        """Imports fsspec and what it needs for the scheme."""
        try:
            import fsspec

            fsspec.get_filesystem_class(scheme)
        except (ImportError, ValueError) as error:
            raise ValueError(
                f"An exchange at {scheme}:// must be one that fsspec reads; "
                f"received {error}. Run pip install 'tfdistill[cloud]'."
            ) from error
        self._scheme = scheme

    @property
    def _store(self) -> Any:
        # A store's connections do not survive a fork.
        return _connected(self._scheme, os.getpid())

    def list_dir(self, path: str) -> list[str]:
        """Returns the names in what must not be a file."""
        with _os_errors(path):
            found = self._store.ls(path, detail=True)
            own = self._store._strip_protocol(path)
        names = [entry["name"].rstrip("/") for entry in found]
        if [entry["name"] for entry in found] == [own]:
            raise NotADirectoryError(errno.ENOTDIR, "not a directory", path)
        # Consoles mark a directory by an empty object, `<own>/`.
        return [name.rpartition("/")[2] for name in names if name != own]

    def stat(self, path: str) -> Stat:
        """Returns what is known of `path`."""
        with _os_errors(path):
            return _stat(self._store.info(path))

    def blocks(self, path: str) -> Iterator[bytes]:
        """Yields a file's content: one request for each block."""
        start, block = 0, None
        while block is None or len(block) == BLOCK_BYTES:
            with _os_errors(path):
                try:
                    block = self._store.cat_file(
                        path, start=start, end=start + BLOCK_BYTES
                    )
                except FileNotFoundError:
                    raise
                except Exception:
                    # Stores refuse a range of nothing, each in its own way.
                    if self.stat(path)[1:3] != (True, start):
                        raise
                    return
            start += BLOCK_BYTES
            if block:
                yield block

    def write(self, path: str, blocks: Iterable[bytes]) -> None:
        """Writes a file, which appears whole; large ones go up in parts."""
        with _os_errors(path):
            file = self._store.open(path, "wb")
            try:
                for block in blocks:
                    file.write(block)
                file.close()
            except BaseException:
                # Or its end, whenever that is, publishes what came so far.
                with contextlib.suppress(Exception):
                    file.closed = True
                    file.discard()
                raise

    def sync(self, path: str) -> None:
        """Does nothing: what a store has accepted is durable."""

    def move(self, source: str, target: str) -> bool:
        """Returns False: a store copies and removes file by file."""
        return False

    def make_dirs(self, path: str) -> None:
        """Does nothing; see the class. A bucket must exist."""

    def remove(self, path: str) -> None:
        """Removes one file."""
        self.stat(path)  # Removing an absent file isn't an error.
        with _os_errors(path):
            self._store.rm_file(path)

    def remove_tree(self, path: str) -> None:
        """Removes all files below; fine if there are none."""
        # One by one: fsspec takes * and ? in the path given to `rm` for more.
        with contextlib.suppress(FileNotFoundError), _os_errors(path):
            for name in self._store.find(path):
                self._store.rm_file(name)

    def walk(self, root: str) -> Iterator[tuple[str, Stat]]:
        """As the function `walk`, files only: a request for a thousand."""
        with _os_errors(root):
            found = self._store.find(root, detail=True)
            start = self._store._strip_protocol(root) + "/"
        if not found:
            raise FileNotFoundError(errno.ENOENT, "no such directory", root)
        for path, entry in found.items():
            if not path.endswith("/"):  # It marks a directory; see `list_dir`.
                yield path.removeprefix(start), _stat(entry)


FileSystem: TypeAlias = LocalFileSystem | ObjectStore

# No wait for a store is longer than a few of these: fsspec tries again.
_CONNECT_SECS, _READ_SECS, _TRIES = 5, 10, 2
_AZURE = {"connection_timeout": _CONNECT_SECS, "read_timeout": _READ_SECS}
_BOUNDS: dict[str, dict[str, Any]] = {
    "s3": {
        "config_kwargs": {
            "connect_timeout": _CONNECT_SECS,
            "read_timeout": _READ_SECS,
            # s3fs tries again; each of its tries would be several of these.
            "retries": {"total_max_attempts": 1},
        }
    },
    "az": _AZURE,
    "abfs": _AZURE,
    "gs": {"requests_timeout": _READ_SECS},
}


@functools.lru_cache(maxsize=8)
def _connected(scheme: str, process_id: int) -> Any:
    """Returns the fsspec file system of a scheme in this process.

    fsspec would keep one for each thread that ever used it.
    """
    import fsspec

    options = {
        # Other processes' files must be seen at once.
        **{"use_listings_cache": False, "skip_instance_cache": True},
        **_BOUNDS.get(scheme, {}),
        # The user's own settings, in fsspec's files and variables.
        **fsspec.config.conf.get(scheme, {}),
    }
    store = fsspec.filesystem(scheme, **options)
    if scheme == "s3":
        # It has no option for them: five, and five times five for a read.
        store.retries = _TRIES
    return store


def _stat(entry: dict[str, Any]) -> Stat:
    is_dir = entry["type"] == "directory"
    return Stat(is_dir, not is_dir, int(entry["size"] or 0))


@contextlib.contextmanager
def _os_errors(path: str) -> Iterator[None]:
    try:
        yield
    except OSError:
        raise
    # Each store's client has its own errors for requests without an answer.
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        raise OSError(errno.EIO, text, path) from error


def in_object_store(path: str | os.PathLike[str]) -> bool:
    """Whether TensorFlow's own operations cannot read there."""
    url = _URL.match(os.fspath(path))
    if url is None:
        return False
    import tensorflow as tf

    return url[1] not in tf.io.gfile.get_registered_schemes()


def for_root(root: str | os.PathLike[str]) -> tuple[FileSystem, str]:
    """Returns the file system of a path or URL, and the root made absolute."""
    if not isinstance(root, str | os.PathLike) or not os.fspath(root):
        raise ValueError(
            "The root of an exchange must be a directory or a URL, as "
            f"text or pathlib.Path; received {root!r}."
        )
    text = os.fspath(root)
    if url := _URL.match(text):
        return ObjectStore(url[1]), text.rstrip("/")
    if _NEARLY_URL.match(text):
        raise ValueError(
            "A URL must have two slashes after its scheme, and a path; "
            f"received {text!r}. pathlib.Path folds slashes: pass a str."
        )
    return LocalFileSystem(), os.path.abspath(text)


def walk(file_system: FileSystem, root: str) -> Iterator[tuple[str, Stat]]:
    """Yields the path below `root` and the `Stat` of all that is in it."""
    if isinstance(file_system, ObjectStore):
        yield from file_system.walk(root)
        return
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
