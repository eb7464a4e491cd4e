"""Which versions were mixed at which step, beside the backups of a group.

The chief notes each mix. A training that resumes repeats the mixes between its
backup and where it was stopped, with the same versions, as long as the exchange
still has them.
"""

import contextlib
import dataclasses
import json
import logging
import pathlib
from collections.abc import Mapping
from typing import Any

from tfdistill.system import run_files

_log = logging.getLogger(__name__)
_NAME = "mixes.jsonl"


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
    """Lines of JSON; without a backup it neither keeps nor repeats anything."""

    def __init__(self, backup: Any = None, *, is_chief: bool = True) -> None:
        """Opens that of a training with this `Backup`.

        One that starts at step 0 begins a new one.
        """
        self._lines: run_files.LineFile | None = None
        self._replay: Mapping[int, Entry] = {}
        self._has_warned = False
        if backup is None:
            return
        path = pathlib.Path(backup.directory, _NAME)
        if backup.resumed_step is not None:
            self._replay = _read(path, after=backup.resumed_step)
        if is_chief:
            if backup.resumed_step is None:
                path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # `add` will say so.
                path.parent.mkdir(parents=True, exist_ok=True)
            self._lines = run_files.LineFile(path)

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
        if self._lines is None:
            return
        self._lines.append({"step": step, **dataclasses.asdict(entry)})
        if error := self._lines.error:
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
