"""Does the exchange take, show and keep what is written to it?"""

import contextlib
import uuid
from collections.abc import Iterator

from tfdistill.cluster import identity
from tfdistill.doctor import check
from tfdistill.exchange import filesystem

EXCHANGE = "exchange"
WORKDIR = "workdir"
_CONTENT = b"written by tfdistill-doctor, and may be removed\n"
_REMEDY = (
    "Give the user that runs the tasks a directory of its own and the right to "
    "do so there (mkdir -p, chown), and look for a full disk or quota (df -h, "
    "df -i). A storage that does not show what was written must be mounted "
    "without caches of names (on NFS lookupcache=positive), or be another."
)


def examine(cluster: identity.Cluster) -> Iterator[check.Result]:
    """Checks the exchange and the workdir of a task."""
    for name, root in (
        (EXCHANGE, cluster.exchange),
        (WORKDIR, cluster.workdir),
    ):
        if root is None:
            yield check.skipped(name, f"no {name} is set")
        else:
            yield of(root, name=name)


def of(
    root: str,
    *,
    name: str = EXCHANGE,
    file_system: filesystem.FileSystem | None = None,
) -> check.Result:
    """Writes, lists, renames, reads and removes a small directory.

    A `file_system` is used with `root` as it is.
    """
    try:
        if file_system is None:
            file_system, root = filesystem.for_root(root)
    except (ImportError, ValueError) as error:
        return check.failed(
            name,
            str(error),
            "Correct TFDISTILL_EXCHANGE, or install what its scheme needs.",
        )
    path = f"{root}/.doctor-{uuid.uuid4().hex}"
    step = ""
    try:
        for next_step in _use(file_system, path):
            step = next_step
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError):
            file_system.remove_tree(path)
        return check.failed(name, f"{root}: could not {step}: {error}", _REMEDY)
    return check.ok(name, f"{root}: wrote, renamed, read back and removed")


def _use(storage: filesystem.FileSystem, path: str) -> Iterator[str]:
    """Yields what it is about to do."""
    yield "make a directory"
    storage.make_dirs(f"{path}/a")
    yield "write"
    storage.write(f"{path}/a/file", [_CONTENT])
    final = f"{path}/a"
    if storage.renames_atomically:
        yield "rename"
        # If it cannot be, versions come file by file, the manifest last.
        if storage.move(final, f"{path}/b"):
            final = f"{path}/b"
    yield "list"
    names = storage.list_dir(final)
    if names != ["file"]:
        raise ValueError(f"it shows {names} where ['file'] was written")
    yield "read back"
    found = filesystem.read(storage, f"{final}/file", max_bytes=len(_CONTENT))
    if found != _CONTENT:
        raise ValueError(f"{len(found)} different bytes came back")
    yield "remove"
    storage.remove_tree(path)
