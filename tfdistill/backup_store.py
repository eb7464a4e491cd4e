"""Where the backups of one group lie: whole ones, the newest, the damaged."""

import logging
import os
from typing import Any

from tfdistill import exchange as exchange_lib
from tfdistill import retention

_log = logging.getLogger(__name__)


class BackupStore(exchange_lib.Exchange):
    """Backups on disk, as versions of an exchange with one group.

    A backup is put together out of sight, checksummed, and becomes visible by
    one rename.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, max_to_keep: int = 2
    ) -> None:
        """Touches no storage.

        Args:
            directory: Where backups lie; this group's own.
            max_to_keep: Number of backups to keep, >= 2.
        """
        super().__init__(
            directory,
            max_to_keep=max_to_keep,
            min_keep_secs=0.0,
            # The group's own files outlive the run and its key.
            key=None,
        )

    def newest(self) -> exchange_lib.Version | None:
        """Returns the newest whole backup, all of whose bytes were checked.

        Those that are newer and damaged are logged and removed: they can
        never be used, and would push whole ones out when the next are kept.

        Returns:
            The backup, or None where there is no whole one.
        """
        damaged = []
        for step in reversed(self.steps(0)):
            try:
                version = self.open(0, step)
                self.verify(version)
            except exchange_lib.CorruptVersionError as error:
                _log.warning("Trying the backup before: %s", error)
                damaged.append(self.version_path(0, step))
                continue
            for path in damaged:
                self._remove(path)
            return version
        if damaged:
            _log.warning(
                "No whole backup is left in %s: training starts anew.",
                self.group_path(0),
            )
        return None

    def _remove(self, path: str) -> None:
        try:
            retention.remove_version(self._file_system, path)
        except OSError as error:
            _log.warning("Could not remove %s: %s", path, error)


def check_same(theirs: Any, ours: Any, path: str) -> None:
    """Checks that a backup is of this model and optimizer.

    Args:
        theirs: Shape and dtype by key, from the backup's manifest.
        ours: The same of this training.
        path: Of the backup, for the message.

    Raises:
        ValueError: They differ.
    """
    found = {key: dict(entry) for key, entry in theirs.items()}
    if found == ours:
        return
    keys = sorted(found.keys() ^ ours.keys()) or [
        key for key in sorted(ours) if found[key] != ours[key]
    ]
    raise ValueError(
        f"The backup {path} must be of this model and optimizer; received one "
        f"that differs in {keys[:5]}. Give another directory, or the model as "
        "it was."
    )
