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
