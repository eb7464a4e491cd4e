"""Which versions of a group may go, and how they and leftovers are removed."""

import contextlib
import errno
import logging
import math
import uuid
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence

from tfdistill import filesystem
from tfdistill import manifest
from tfdistill import version_names

# What mounts without a rename of directories answer: other devices, gcsfuse.
NO_RENAME = frozenset(
    {errno.EXDEV, errno.ENOTSUP, errno.ENOSYS, errno.EMFILE, errno.EPERM}
)
LEASE_SECS = 3600.0

_log = logging.getLogger(__name__)


class Retention:
    """Decides by this process' own clock which versions may go.

    A version may go once `max_to_keep` newer ones exist and `min_keep_secs`
    have passed since this object first saw a newer one. Times written by other
    machines play no part, and a restarted publisher starts counting anew.
    """

    def __init__(
        self,
        *,
        max_to_keep: int,
        min_keep_secs: float,
        clock: Callable[[], float],
    ) -> None:
        """Checks the options.

        Args:
          max_to_keep: Number of newest versions that always stay; at least 2.
          min_keep_secs: Seconds that a version stays once it is superseded.
          clock: Seconds of a clock that never goes backwards.
        """
        if type(max_to_keep) is not int or max_to_keep < 2:
            raise ValueError(
                "`max_to_keep` must be an integer >= 2, or the version that a "
                "peer is reading could be removed as the next one appears; "
                f"received {max_to_keep!r}."
            )
        if not min_keep_secs >= 0:
            raise ValueError(
                "`min_keep_secs` must be >= 0 seconds; received "
                f"{min_keep_secs!r}."
            )
        self._max_to_keep = max_to_keep
        self._min_keep_secs = min_keep_secs
        self._clock = clock
        self._superseded: dict[int, dict[int, float]] = {}

    def expired(self, group: int, steps: Sequence[int]) -> list[int]:
        """Returns the versions that may go now, oldest first.

        Args:
          group: The group they belong to.
          steps: All its versions, ascending.
        """
        now = self._clock()
        earlier = self._superseded.get(group, {})
        since = {step: earlier.get(step, now) for step in steps[:-1]}
        self._superseded[group] = since
        return [
            step
            for step in steps[: -self._max_to_keep]
            if now - since[step] >= self._min_keep_secs
        ]


def remove_version(file_system: filesystem.FileSystem, directory: str) -> None:
    """Removes a version so that no reader ever takes a part for the whole."""
    parent, _, name = directory.rpartition("/")
    trash = f"{parent}/.trash-{name}-{uuid.uuid4().hex}"
    if move(file_system, directory, trash):
        file_system.remove_tree(trash)
        return
    try:
        file_system.remove(f"{directory}/{manifest.FILE_NAME}")
    except FileNotFoundError:
        pass  # A part of a version: what never was published.
    file_system.remove_tree(directory)


def move(file_system: filesystem.FileSystem, source: str, target: str) -> bool:
    """Renames a directory as a whole, or returns False where none can."""
    if not file_system.renames_atomically:
        return False
    try:
        file_system.rename(source, target)
    except OSError as error:
        if error.errno in NO_RENAME:
            return False
        raise
    return True


def sweep(
    file_system: filesystem.FileSystem,
    group_dir: str,
    *,
    incarnation: str,
    lease_secs: float,
) -> None:
    """Removes what crashed publishers of one group left behind.

    Trash goes at once, and so do temporary directories of `incarnation`. What
    another incarnation was writing goes when nothing in it has changed for
    `lease_secs`, seen from the newest manifest of the group: both times come
    from the storage's clock, so the clocks of the machines do not matter.

    Args:
      file_system: Where the group's directory is.
      group_dir: The directory.
      incarnation: The caller's own, which must not be publishing meanwhile.
      lease_secs: Seconds after which an unfinished version is abandoned.
    """
    manifests = [0.0]
    unfinished = []
    for path in _directories(file_system, group_dir):
        name = path.rpartition("/")[2]
        if name.startswith(".trash-") or (
            name.startswith(".tmp-") and name.endswith(incarnation)
        ):
            _remove(file_system, path)
        elif name.startswith(".tmp-"):
            unfinished.append(path)
        elif version_names.step_of(name) is not None:
            written = _manifest_time(file_system, path)
            if written is None:
                unfinished.append(path)
            else:
                manifests.append(written)
    for path in unfinished:
        changed = _last_change(file_system, path)
        if max(manifests) - changed >= lease_secs:
            _log.info("Removing %s, abandoned by its publisher.", path)
            _remove(file_system, path)


def _directories(
    file_system: filesystem.FileSystem, parent: str
) -> Iterator[str]:
    try:
        names = file_system.list_dir(parent)
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in sorted(names):
        path = f"{parent}/{name}"
        with contextlib.suppress(FileNotFoundError):
            if file_system.stat(path).is_dir:
                yield path


def _remove(file_system: filesystem.FileSystem, path: str) -> None:
    try:
        file_system.remove_tree(path)
    except OSError as error:
        _log.warning("Could not remove %s: %s", path, error)


def _manifest_time(
    file_system: filesystem.FileSystem, directory: str
) -> float | None:
    try:
        return file_system.stat(f"{directory}/{manifest.FILE_NAME}").modified
    except FileNotFoundError:
        return None


def _last_change(file_system: filesystem.FileSystem, directory: str) -> float:
    try:
        changes = [file_system.stat(directory).modified]
        for _, found in filesystem.walk(file_system, directory):
            changes.append(found.modified)
        return max(changes)
    except FileNotFoundError:  # Its publisher is at work.
        return math.inf
