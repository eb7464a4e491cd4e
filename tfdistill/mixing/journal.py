"""Which versions were mixed at which step, beside the backups of a group.

A training that resumes repeats the mixes between its backup and where it was
stopped, with the same versions, as long as the exchange still has them.
"""

import json
import logging
import pathlib
from collections.abc import Mapping
from typing import Any

_log = logging.getLogger(__name__)
_NAME = "mixes.jsonl"


class Journal:
    """Lines of JSON; without a path it neither keeps nor repeats anything."""

    def __init__(
        self, path: pathlib.Path | None, *, resumed_step: int | None = None
    ) -> None:
        """Reads what is to be repeated after `resumed_step`."""
        self._path = path
        self._replay: dict[int, dict[int, int]] = {}
        self._has_warned = False
        if path is not None and resumed_step is not None:
            self._replay = _read(path, after=resumed_step)

    @classmethod
    def beside(cls, backup: Any, *, writes: bool) -> "Journal":
        """Makes the journal of a training with this `Backup`, or None.

        One that starts at step 0 begins a new one, if this task `writes`.
        """
        if backup is None:
            return cls(None)
        path = pathlib.Path(backup.directory, _NAME)
        if backup.resumed_step is None and writes:
            path.unlink(missing_ok=True)
        return cls(path, resumed_step=backup.resumed_step)

    def replay(self, step: int) -> Mapping[int, int] | None:
        """Returns what was mixed at a step; None if that is not known."""
        return self._replay.get(step)

    def warn(self, step: int) -> None:
        """Says that a mix cannot be repeated, once."""
        if not self._has_warned:
            _log.warning(
                "The mix at step %d cannot be repeated as it was before this "
                "training was stopped: the exchange does not have all of its "
                "versions any more. Weights will differ from those of a "
                "training that was not stopped.",
                step,
            )
        self._has_warned = True

    def add(self, step: int, versions: Mapping[int, int]) -> None:
        """Notes a mix, or with no versions one that was left out."""
        if self._path is None:
            return
        line = {
            "step": step,
            "versions": {str(g): s for g, s in versions.items()},
        }
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            _log.warning("Could not note the mix of step %d: %s", step, error)


def _read(path: pathlib.Path, *, after: int) -> dict[int, dict[int, int]]:
    found: dict[int, dict[int, int]] = {}
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return found
    for line in lines:
        try:
            entry = json.loads(line)
            versions = {int(g): int(s) for g, s in entry["versions"].items()}
            step = int(entry["step"])
        except (AttributeError, KeyError, TypeError, ValueError):
            continue  # A crash has cut it short.
        if step > after:
            # The last word counts: it may have been repeated before.
            found[step] = versions
    return found
