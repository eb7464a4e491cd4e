"""What the groups of one run write by themselves: no path of two groups.

All groups run the same script, so that a fixed path in it, such as
`ModelCheckpoint("best.keras")`, is one file for all, which each overwrites.
Whoever writes there leaves an empty file in the workdir, so that groups see it.
"""

import hashlib
import logging
import os
import pathlib
from collections.abc import Iterable
from typing import Any

from tfdistill.cluster import identity
from tfdistill.system import run_files

_log = logging.getLogger(__name__)
_DIRECTORY = "outputs"
# In the directory of a group: what its script writes.
_FILES = "files"
# What Keras' callbacks and ours call the path that they write to.
_ATTRIBUTES = "filepath", "filename", "log_dir", "backup_dir", "directory"
# Markers of this process: callbacks save to a path again and again.
_taken: set[pathlib.Path] = set()


def of_callbacks(callbacks: Iterable[Any]) -> dict[str, str]:
    """Returns by path which callback writes there.

    Example:
        >>> import keras
        >>> of_callbacks([keras.callbacks.CSVLogger("log.csv")])
        {'log.csv': 'CSVLogger'}
    """
    found: dict[str, str] = {}
    for callback in callbacks:
        for name in _ATTRIBUTES:
            path = getattr(callback, name, None)
            if isinstance(path, str | os.PathLike) and os.fspath(path):
                found[os.fspath(path)] = type(callback).__name__
    return found


def take(path: str, what: str, cluster: identity.Cluster) -> None:
    """Notes that this group writes to a path; warns if another one does.

    Once for each path, and not in a run of one group, or without a workdir that
    groups share.

    Args:
        path: As the script has it.
        what: Who writes there, for the message.
        cluster: Says which group this is, and where the run's files are.
    """
    if cluster.num_groups == 1 or not cluster.workdir:
        return
    whole = run_files.real(path)
    key = hashlib.sha256(whole.encode()).hexdigest()[:16]
    place = pathlib.Path(cluster.workdir, _DIRECTORY)
    own = run_files.group_name(cluster.group)
    marker = place / f"{key}.{own}"
    if marker in _taken:
        return
    _taken.add(marker)
    try:
        place.mkdir(parents=True, exist_ok=True)
        # By their names: nobody has to read a file that is being written.
        marker.touch()
        holders = {each.suffix[1:] for each in place.glob(f"{key}.*")}
    except OSError as error:
        _log.info("Nobody knows who else writes to %s: %s", path, error)
        return
    others = sorted(holders - {own})
    if others:
        _log.warning(
            "%s of %s writes to %s, as %s does: each overwrites what the other "
            "has written. Give each group its own path, such as one "
            "below tfdistill.Cluster.from_env().group_dir.",
            what,
            own,
            path,
            ", ".join(others),
        )


class GroupFiles:
    """Where a group writes what its script writes by one name in all groups.

    The first group writes where the script says, each other one to the same
    name below its own directory, and reads it there.
    """

    def __init__(self, cluster: identity.Cluster) -> None:
        """Moves nothing in a run of one group, or without a workdir."""
        self._own = cluster.group_dir if cluster.group else None
        self._moved: dict[str, str] = {}

    def written(self, path: Any) -> Any:
        """Returns where to write what a script would write to a path."""
        if self._own is None or not isinstance(path, str | os.PathLike):
            return path
        given = os.fspath(path)
        whole = run_files.real(given)
        if not given or whole.startswith(run_files.real(self._own) + os.sep):
            return path
        if whole not in self._moved:
            here = os.path.relpath(whole)
            name = whole.lstrip(os.sep) if here.startswith("..") else here
            moved = f"{self._own}/{_FILES}/{name}"
            if "://" not in moved:
                os.makedirs(os.path.dirname(moved), exist_ok=True)
            self._moved[whole] = moved
            _log.warning("This group writes %s to %s.", given, moved)
        return self._moved[whole]

    def read(self, path: Any) -> Any:
        """Returns where to read what was written to a path."""
        if not self._moved or not isinstance(path, str | os.PathLike):
            return path
        return self._moved.get(run_files.real(os.fspath(path)), path)

    def move(self, callbacks: Iterable[Any]) -> None:
        """Has callbacks write there, whatever they have made of their path."""
        if self._own is None:
            return
        for callback in callbacks:
            for path in of_callbacks([callback]):
                moved = self.written(path)
                for name, value in list(vars(callback).items()):
                    value = os.fspath(value) if _is_path(value) else value
                    if isinstance(value, str) and (
                        value == path or value.startswith(f"{path}/")
                    ):
                        setattr(callback, name, moved + value[len(path) :])


def _is_path(value: Any) -> bool:
    return isinstance(value, os.PathLike)
