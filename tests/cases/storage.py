"""Storage for tests of the exchange: in memory, failing, slow to show."""

import errno
import os

from tfdistill.exchange import filesystem


class Killed(BaseException):
    """Stands for the end of the process: nothing catches it."""


class Faults:
    """Passes calls on, and fails the `fail_at`-th one.

    `dead` makes all later calls fail too, as if the process had ended there.
    `hidden` maps paths to the error that looking at them gives.
    """

    def __init__(self, inner, *, fail_at=None, error=None, dead=False):
        self.inner = inner
        self.renames_atomically = inner.renames_atomically
        self.fail_at = fail_at
        self.error = error
        self.dead = dead
        self.hidden = {}
        self.calls = []

    def check(self, name, path):
        self.calls.append((name, path))
        for prefix, number in self.hidden.items():
            if path.startswith(prefix):
                raise OSError(number, os.strerror(number), path)
        count = len(self.calls)
        if self.fail_at and (
            count == self.fail_at or (self.dead and count > self.fail_at)
        ):
            raise self.error

    def __getattr__(self, name):
        method = getattr(self.inner, name)

        def call(path, *args):
            self.check(name, path)
            return method(path, *args)

        return call


class NoDirectoryRename(filesystem.LocalFileSystem):
    """A mount that renames files and no directories: EXDEV, for one."""

    def move(self, source, target):
        return False


def _names(path, files):
    """What lies directly in a directory of a store."""
    start = path + "/"
    names = {
        name[len(start) :].split("/", 1)[0]
        for name in files
        if name.startswith(start)
    }
    if not names:
        raise FileNotFoundError(errno.ENOENT, "no such directory", path)
    return list(names)


class MemoryFileSystem:
    """An object store: single files appear whole, directories do not exist.

    Every change of a file is also kept in `changes`, for a reader's delayed
    view of it.
    """

    renames_atomically = False

    def __init__(self):
        self.files = {}
        self.changes = []

    def apply(self, path, content):
        self.changes.append((path, content))
        if content is None:
            del self.files[path]
        else:
            self.files[path] = content

    def list_dir(self, path):
        return _names(path, self.files)

    def stat(self, path):
        if path in self.files:
            size = len(self.files[path])
            return filesystem.Stat(False, True, size)
        _names(path, self.files)
        return filesystem.Stat(True, False, 0)

    def blocks(self, path):
        if path not in self.files:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        yield self.files[path]

    def write(self, path, blocks):
        self.apply(path, b"".join(blocks))

    def sync(self, path):
        raise OSError(errno.ENOTSUP, "nothing to sync", path)

    def move(self, source, target):
        return False

    def make_dirs(self, path):
        pass

    def remove(self, path):
        if path not in self.files:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        self.apply(path, None)

    def remove_tree(self, path):
        for name in [n for n in self.files if n.startswith(path + "/")]:
            self.remove(name)


class DelayedView(MemoryFileSystem):
    """What one reader sees of a store whose changes come late, in any order.

    `advance` lets the next change of one path come into sight; changes of one
    path keep their order. Directory listings may be older still: `list_dir`
    answers as of up to `stale_looks` advances ago. Some calls fail: a share
    `fail_share` of them.
    """

    ERRORS = (errno.ESTALE, errno.EIO, errno.ENOENT, errno.ETIMEDOUT)

    def __init__(self, changes, rng, *, stale_looks=0, fail_share=0.0):
        super().__init__()
        self.rng = rng
        self.stale_looks = stale_looks
        self.fail_share = fail_share
        self._pending = {}
        for path, content in changes:
            self._pending.setdefault(path, []).append(content)
        self._order = [path for path, _ in changes]
        rng.shuffle(self._order)
        self._listed = [frozenset()]

    @property
    def is_settled(self):
        return not self._order

    def advance(self, count):
        for path in self._order[:count]:
            content = self._pending[path].pop(0)
            if content is None:
                self.files.pop(path, None)
            else:
                self.files[path] = content
        del self._order[:count]
        self._listed.append(frozenset(self.files))

    def settle(self):
        self.advance(len(self._order))
        self._listed = [frozenset(self.files)]
        self.fail_share = 0.0

    def list_dir(self, path):
        self._fail(path)
        age = self.rng.randint(0, self.stale_looks) if self.stale_looks else 0
        return _names(path, self._listed[max(-1 - age, -len(self._listed))])

    def stat(self, path):
        self._fail(path)
        return super().stat(path)

    def blocks(self, path):
        self._fail(path)
        return super().blocks(path)

    def _fail(self, path):
        if self.fail_share and self.rng.random() < self.fail_share:
            number = self.rng.choice(self.ERRORS)
            raise OSError(number, os.strerror(number), path)
