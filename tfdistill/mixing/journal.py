"""Which versions were mixed at which step, beside the backups of a group.

The chief notes each mix. A training that resumes repeats the mixes between its
backup and where it was stopped, with the same versions, as long as the exchange
still has them.
"""

import contextlib
import json
import logging
import pathlib
from typing import Any

from tfdistill.system import run_files

_log = logging.getLogger(__name__)
_NAME = "mixes.jsonl"
# By group, the step of the version that was mixed; empty if the mix was left
# out, and None if the group mixes no more from here on.
Mixed = dict[int, int] | None


class Journal:
    """Lines of JSON; without a backup it neither keeps nor repeats anything."""

    def __init__(self, backup: Any = None, *, is_chief: bool = True) -> None:
        """Opens the journal of a training with this `Backup`.

        A training that starts at step 0 begins a new journal.
        """
        self._lines: run_files.LineFile | None = None
        self._known: dict[int, Mixed] = {}
        self._has_warned = False
        if backup is None:
            return
        path = pathlib.Path(backup.directory, _NAME)
        if backup.resumed_step is not None:
            self._known = _read(path, after=backup.resumed_step)
        if is_chief:
            if backup.resumed_step is None:
                path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # `add` will say so.
                path.parent.mkdir(parents=True, exist_ok=True)
            self._lines = run_files.LineFile(path)

    def replay(self, step: int) -> tuple[bool, Mixed]:
        """Returns whether a mix is to be repeated at a step, and which."""
        return step in self._known, self._known.get(step)

    def warn(self, step: int) -> None:
        """Warns once that a mix cannot be repeated."""
        if not self._has_warned:
            _log.warning(
                "The mix at step %d can't be repeated exactly: some of its "
                "versions are gone from the exchange. Weights will differ from "
                "the weights of an uninterrupted training.",
                step,
            )
        self._has_warned = True

    def add(self, step: int, mixed: Mixed) -> None:
        """Notes what became of a mix."""
        if self._lines is None:
            return
        self._lines.append({"step": step, "versions": mixed})
        if error := self._lines.error:
            _log.warning("Could not note the mix of step %d: %s", step, error)


def _read(path: pathlib.Path, *, after: int) -> dict[int, Mixed]:
    """Returns the mixes after a step; the last word on each counts."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    found: dict[int, Mixed] = {}
    for line in lines:
        try:
            fields = json.loads(line)
            step, versions = int(fields["step"]), fields["versions"]
            if versions is not None:
                versions = {int(g): int(s) for g, s in versions.items()}
        except (AttributeError, KeyError, TypeError, ValueError):
            continue  # A crash has cut it short.
        if step > after:
            found[step] = versions
    return found
