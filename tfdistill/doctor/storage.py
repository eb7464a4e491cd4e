"""Does the exchange take, show and keep what is written to it?"""

import os
import shutil
import time
import uuid
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any
from typing import NamedTuple

from tfdistill.cluster import identity
from tfdistill.doctor import check
from tfdistill.exchange import filesystem
from tfdistill.exchange import reader

EXCHANGE = "exchange"
WORKDIR = "workdir"
CLOCK = "clock"
_CONTENT = b"written by tfdistill-doctor, and may be removed\n"
# Timestamps are as coarse as a second or two on some mounts.
_MAX_CLOCK_SECS = 5.0
# A publisher takes its time between the manifest's and the storage's stamp.
_MAX_GROUP_SECS = 120.0
_MIN_FREE_BYTES = 1_000_000_000
_CLOCK_REMEDY = (
    "Keep the clocks of hosts and storage together with NTP: logs, curves and "
    "ages in the status are read by them. No decision is."
)
_REMEDIES = {
    "make a directory": "Make the directory for the user that runs the tasks "
    "(mkdir -p, chown), or name another by TFDISTILL_EXCHANGE.",
    "write": "Give the user that runs the tasks the right to write there, and "
    "look for a full disk or quota (df -h, df -i).",
    "read back": "The storage does not return what was written to it: remount "
    "it, or use another.",
    "list": "The storage does not show what was written to it: mount it "
    "without caches of names (on NFS lookupcache=positive), or use another.",
    "rename": "Directories must be renamed by the user that runs the tasks: "
    "look at its rights there.",
    "remove": "Give the user that runs the tasks the right to remove what it "
    "has written, or old versions fill the storage.",
}


class StepError(Exception):
    """A step of the examination failed."""

    def __init__(self, step: str, why: object) -> None:
        """Notes the step, one of the remedies, and why it failed."""
        super().__init__(f"could not {step}: {why}")
        self.step = step


class _Seen(NamedTuple):
    renamed: bool
    modified: float
    written: tuple[float, float]


def checks(
    cluster: identity.Cluster,
) -> Iterator[tuple[str, Callable[[], Iterable[check.Result]]]]:
    """Yields the name of each check of a task's storage, and what makes it."""
    root, workdir = cluster.exchange, cluster.workdir
    if root is None:
        yield EXCHANGE, lambda: [check.skipped(EXCHANGE, "no exchange is set")]
    else:
        groups = cluster.num_groups
        yield EXCHANGE, lambda: exchange(root)
        yield EXCHANGE, lambda: [space(root, name=EXCHANGE, num_groups=groups)]
        yield CLOCK, lambda: clocks(root, groups)
    if workdir is None:
        yield WORKDIR, lambda: [check.skipped(WORKDIR, "no workdir is set")]
    else:
        yield WORKDIR, lambda: exchange(workdir, name=WORKDIR)
        yield WORKDIR, lambda: [space(workdir, name=WORKDIR)]


def exchange(
    root: str,
    *,
    name: str = EXCHANGE,
    file_system: filesystem.FileSystem | None = None,
    clock: Callable[[], float] = time.time,
) -> Iterator[check.Result]:
    """Writes, lists, renames, reads and removes a small directory.

    A `file_system` is used with `root` as it is.
    """
    try:
        if file_system is None:
            file_system, root = filesystem.for_root(root)
    except (ImportError, ValueError) as error:
        yield check.failed(
            name,
            str(error),
            "Correct TFDISTILL_EXCHANGE, or install what its scheme needs.",
        )
        return
    path = f"{root}/.doctor-{uuid.uuid4().hex}"
    try:
        seen = _use(file_system, path, clock)
    except StepError as error:
        _clear(file_system, path)
        yield check.failed(name, f"{root}: {error}", _REMEDIES[error.step])
        return
    how = (
        "renamed a directory"
        if seen.renamed
        else "no rename of directories: versions come file by file, the "
        "manifest last"
    )
    yield check.ok(name, f"{root}: wrote, listed, read back and removed; {how}")
    before, after = seen.written
    apart = max(seen.modified - after, before - seen.modified)
    if seen.modified and apart > _MAX_CLOCK_SECS:
        yield check.warning(
            CLOCK,
            f"the clock of {root} differs from this host's by {apart:.0f} s",
            _CLOCK_REMEDY,
        )


def _use(
    storage: filesystem.FileSystem, path: str, clock: Callable[[], float]
) -> _Seen:
    _try("make a directory", lambda: storage.make_dirs(f"{path}/a"))
    before = clock()
    _try("write", lambda: storage.write(f"{path}/a/file", [_CONTENT]))
    after = clock()
    final = f"{path}/a"
    renamed = storage.renames_atomically
    if renamed:
        final = f"{path}/b"
        try:
            storage.rename(f"{path}/a", final)
        except OSError as error:
            if error.errno not in filesystem.NO_RENAME:
                raise StepError("rename", error) from error
            final, renamed = f"{path}/a", False
    names = _try("list", lambda: storage.list_dir(final))
    if names != ["file"]:
        raise StepError("list", f"it shows {names} where ['file'] was written")
    found = _try(
        "read back",
        lambda: filesystem.read(
            storage, f"{final}/file", max_bytes=len(_CONTENT)
        ),
    )
    if found != _CONTENT:
        raise StepError("read back", f"{len(found)} different bytes came back")
    modified = _try("list", lambda: storage.stat(f"{final}/file")).modified
    _try("remove", lambda: storage.remove_tree(path))
    return _Seen(renamed, modified, (before, after))


def _try(step: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except OSError as error:
        raise StepError(step, error) from error


def _clear(storage: filesystem.FileSystem, path: str) -> None:
    try:
        storage.remove_tree(path)
    except OSError:
        return  # What failed before is reported.


def space(
    path: str,
    *,
    name: str,
    num_groups: int = 0,
    free_bytes: Callable[[str], int] = lambda path: (
        shutil.disk_usage(path).free
    ),
) -> check.Result:
    """Looks whether a local disk has room for more versions of the groups."""
    if "://" in path:
        return check.skipped(name, f"{path} does not tell how much is free")
    there = os.path.abspath(path)
    while not os.path.isdir(there) and there != os.path.dirname(there):
        there = os.path.dirname(there)
    try:
        free = free_bytes(there)
    except OSError as error:
        return check.skipped(name, f"{there} does not tell its room: {error}")
    num_bytes = _largest_version(there, num_groups)
    # Two versions stay, one is being written, and one is being read.
    needed = max(_MIN_FREE_BYTES, 5 * num_bytes)
    seen = f"{free / 1e9:.1f} GB are free on the disk of {path}"
    if free >= needed:
        return check.ok(name, seen)
    remedy = f"Free at least {needed / 1e9:.1f} GB there, or use another disk."
    if free < max(1_000_000, num_bytes):
        return check.failed(name, seen, remedy)
    return check.warning(name, seen, remedy)


def _largest_version(root: str, num_groups: int) -> int:
    """Returns the bytes of the largest of the groups' newest versions."""
    versions = reader.VersionReader(root, key=None)
    found = [versions.glance(group) for group in range(num_groups)]
    return max((version.num_bytes for version in found if version), default=0)


def clocks(
    root: str,
    groups: int,
    *,
    file_system: filesystem.FileSystem | None = None,
) -> Iterator[check.Result]:
    """Compares each group's clock with the storage's, by its newest version."""
    versions = reader.VersionReader(root, key=None, file_system=file_system)
    compared = []
    for group in range(groups):
        found = versions.glance(group)
        if found is None or not found.modified:
            continue
        apart = found.created - found.modified
        compared.append(f"group {group} {apart:+.0f} s")
        if abs(apart) > _MAX_GROUP_SECS:
            yield check.warning(
                CLOCK,
                f"group {group} published version {found.step} {apart:+.0f} s "
                "from when the storage saw it: its clock differs, or it was "
                "copied there",
                _CLOCK_REMEDY,
            )
    if compared:
        yield check.ok(CLOCK, f"against the storage: {', '.join(compared)}")
    else:
        yield check.skipped(CLOCK, "no version yet to tell a group's clock by")
