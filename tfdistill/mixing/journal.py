"""Which versions were mixed at which step, beside the backups of a group.

Each worker notes its own mixes. By those of the chief, a training that resumes
repeats the mixes between its backup and where it was stopped, with the same
versions, as long as the exchange still has them.
"""

import dataclasses
import json
import logging
import pathlib
from collections.abc import Mapping
from typing import Any

_log = logging.getLogger(__name__)
_NAME = "mixes.jsonl"
_NAME_OF_WORKER = "mixes_worker_{}.jsonl"


@dataclasses.dataclass(frozen=True)
class Entry:
    """What became of a mix.

    Attributes:
        versions: By group, the step of the version that was mixed; empty if
            the mix was left out.
        ends: Whether the group mixes no more from here on.
    """

    versions: Mapping[int, int]
    ends: bool = False


class Journal:
    """Lines of JSON; without a path it neither keeps nor repeats anything."""

    def __init__(self, path: pathlib.Path | None) -> None:
        """Takes where this worker notes its mixes."""
        self._path = path
        self._replay: Mapping[int, Entry] = {}
        self._has_warned = False

    @classmethod
    def beside(cls, backup: Any, *, worker: int) -> "Journal":
        """Makes a worker's journal of a training with this `Backup`, or None.

        One that starts at step 0 begins a new one.
        """
        if backup is None:
            return cls(None)
        own = chief = pathlib.Path(backup.directory, _NAME)
        if worker:
            own = chief.with_name(_NAME_OF_WORKER.format(worker))
        made = cls(own)
        if backup.resumed_step is None:
            own.unlink(missing_ok=True)
        else:
            made._replay = _read(chief, after=backup.resumed_step)
        return made

    def replay(self, step: int) -> Entry | None:
        """Returns what is to be repeated at a step; None if that is unknown."""
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

    def add(self, step: int, entry: Entry) -> None:
        """Notes what became of a mix."""
        if self._path is None:
            return
        line = json.dumps({"step": step, **dataclasses.asdict(entry)})
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            _log.warning("Could not note the mix of step %d: %s", step, error)


def _read(path: pathlib.Path, *, after: int) -> dict[int, Entry]:
    """Returns the entries after a step; the last word on each counts."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    found: dict[int, Entry] = {}
    for line in lines:
        try:
            fields = json.loads(line)
            step = int(fields.pop("step"))
            versions = fields.pop("versions").items()
            entry = Entry({int(g): int(s) for g, s in versions}, **fields)
        except (AttributeError, KeyError, TypeError, ValueError):
            continue  # A crash has cut it short.
        if step > after:
            found[step] = entry
    return found
