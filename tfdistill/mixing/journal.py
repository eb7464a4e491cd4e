"""Which versions were mixed at which step, beside the backups of a group.

Each worker notes its own mixes. By those of the chief, a training that resumes
repeats the mixes between its backup and where it was stopped, with the same
versions, as long as the exchange still has them.
"""

import json
import logging
import pathlib
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

_log = logging.getLogger(__name__)
_NAME = "mixes.jsonl"
_NAME_OF_WORKER = "mixes_worker_{}.jsonl"


class Journal:
    """Lines of JSON; without a path it neither keeps nor repeats anything."""

    def __init__(
        self,
        path: pathlib.Path | None,
        *,
        chief: pathlib.Path | None = None,
        resumed_step: int | None = None,
    ) -> None:
        """Reads what is to be repeated after `resumed_step`, of the chief's.

        `path` is where this worker notes its mixes.
        """
        self._path = path
        self._replay: dict[int, dict[int, int]] = {}
        # By step, the losses that a `MergeBarrier` was opened for.
        self._ends: dict[int, Sequence[float] | None] = {}
        self._has_warned = False
        if chief is not None and resumed_step is not None:
            self._replay, self._ends = _read(chief, after=resumed_step)

    @classmethod
    def beside(cls, backup: Any, *, worker: int) -> "Journal":
        """Makes a worker's journal of a training with this `Backup`, or None.

        One that starts at step 0 begins a new one.
        """
        if backup is None:
            return cls(None)
        chief = pathlib.Path(backup.directory, _NAME)
        own = chief
        if worker:
            own = chief.with_name(_NAME_OF_WORKER.format(worker))
        if backup.resumed_step is None:
            own.unlink(missing_ok=True)
        return cls(own, chief=chief, resumed_step=backup.resumed_step)

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

    def ended_at(self, step: int) -> bool:
        """Whether the group ceased to mix at a step that is to be repeated."""
        return step in self._ends

    def losses_at(self, step: int) -> Sequence[float] | None:
        """Returns the losses for which it ceased to, if they are known."""
        return self._ends.get(step)

    def end(self, step: int, losses: Sequence[float] | None) -> None:
        """Notes that the group mixes no more from this step on, and why."""
        self._write({"step": step, "versions": {}, "ends": {"losses": losses}})

    def add(self, step: int, versions: Mapping[int, int]) -> None:
        """Notes a mix, or with no versions one that was left out."""
        mixed = {str(g): s for g, s in versions.items()}
        self._write({"step": step, "versions": mixed})

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            _log.warning(
                "Could not note the mix of step %d: %s", line["step"], error
            )


def _read(
    path: pathlib.Path, *, after: int
) -> tuple[dict[int, dict[int, int]], dict[int, Sequence[float] | None]]:
    found: dict[int, dict[int, int]] = {}
    ends: dict[int, Sequence[float] | None] = {}
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return found, ends
    for line in lines:
        try:
            entry = json.loads(line)
            versions = {int(g): int(s) for g, s in entry["versions"].items()}
            step, end = int(entry["step"]), entry.get("ends")
        except (AttributeError, KeyError, TypeError, ValueError):
            continue  # A crash has cut it short.
        if step > after:
            # The last word counts: it may have been repeated before.
            found[step] = versions
            ends.pop(step, None)
            if end is not None:
                ends[step] = end["losses"]
    return found, ends
