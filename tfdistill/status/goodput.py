"""Goodput: the share of time in which groups made steps never made before.

docs/monitoring.md defines it. It is computed from the events of launchers
(`run_events`) and from marks, which each group's training appends to
`group_<g>/attempts.jsonl`, one JSON object a line, with `time` and `step`:

    resumed     training begins after that step. `last_step` and `last_time`
                are of the last line that the attempt before had logged, if
                there was one; `fit` is the number of a `fit` that is not its
                process's first
    repeating   the first step was made, and an earlier attempt had made it
    advancing   a step was made that no earlier attempt had made
    ended       training has ended

These lines are never rewritten; the lines of `metrics.jsonl` are, at a resume.
"""

import collections
import dataclasses
import itertools
import os
import pathlib
import time
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from tfdistill.status import directory
from tfdistill.status import run_events
from tfdistill.system import run_files

# Causes of time without new steps, in the order in which they come.
CAUSES = ("detection", "waiting", "start", "restore", "repeated")
_GOOD = "good"
_STATES = (None, _GOOD, *CAUSES)
_IDLE = {*_STATES} - {_GOOD, "repeated"}
# By event or mark, what a group is at after it, by what it was at before; it
# stays at what is not here.
_NEXT: Mapping[str, Mapping[str | None, str | None]] = {
    **dict.fromkeys(
        ("ended", *run_events.ENDED, "end"), dict.fromkeys(_STATES)
    ),
    # An end only if no other start follows.
    "failed": dict.fromkeys(_STATES, "waiting"),
    "lost": dict.fromkeys((_GOOD, "repeated"), "detection"),
    # Workers of a group that trains on may start again by themselves.
    "start": dict.fromkeys(_IDLE, "start"),
    "ready again": {"start": "restore"},
    "resumed": dict.fromkeys({*_STATES} - {"start", "restore"}, "start"),
    "resumed again": dict.fromkeys(
        {*_STATES} - {"start", "restore"}, "restore"
    ),
    "repeating": dict.fromkeys(_STATES, "repeated"),
    "advancing": dict.fromkeys(_STATES, _GOOD),
}


@dataclasses.dataclass(frozen=True)
class Goodput:
    """The seconds of one group, or of several together.

    Attributes:
        good: In which new steps were made.
        lost: In which none were, by cause.
    """

    good: float = 0.0
    lost: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(CAUSES, 0.0)
    )

    @property
    def total(self) -> float:
        """All seconds that count."""
        return self.good + sum(self.lost.values())

    @property
    def share(self) -> float | None:
        """The goodput itself; None if there was no time yet."""
        return self.good / self.total if self.total else None

    def __add__(self, other: "Goodput") -> "Goodput":
        lost = {cause: self.lost[cause] + other.lost[cause] for cause in CAUSES}
        return Goodput(self.good + other.good, lost)

    def to_json(self) -> dict[str, Any]:
        """Returns what results.json has: the share, and the seconds lost."""
        share = None if self.share is None else round(self.share, 4)
        lost = {cause: round(secs, 1) for cause, secs in self.lost.items()}
        return {"share": share, "lost": lost}


def measure(lines: Sequence[Mapping[str, Any]], *, until: float) -> Goodput:
    """Returns the goodput of one group.

    Args:
        lines: Its marks and its launcher's events, of any order.
        until: In Unix seconds; when the group was seen last, or before.
    """
    lost = [
        {"event": "lost", "time": line["last_time"]}
        for line in lines
        if line["event"] == "resumed" and line["last_time"] is not None
    ]
    # Marks continue where an earlier launch ended.
    launched = (x["time"] for x in lines if x["event"] == "start")
    first = min(launched, default=0.0)
    timeline = [x for x in [*lines, *lost] if first <= x["time"] <= until]
    timeline.sort(key=lambda line: line["time"])
    timeline.append({"event": "until", "time": until})
    secs = collections.defaultdict[str | None, float](float)
    state: str | None = None
    for line, following in itertools.pairwise(timeline):
        state = _NEXT.get(_kind(line), {}).get(state, state)
        # Until the last task has connected, it was still the start.
        late = state == "restore" and following["event"] == "ready"
        secs["start" if late else state] += following["time"] - line["time"]
    return Goodput(secs[_GOOD], {cause: secs[cause] for cause in CAUSES})


def _kind(line: Mapping[str, Any]) -> str:
    """Returns the event of a line, and whether it is one of a later start."""
    event = line["event"]
    is_again = event == "ready" and line["attempt"] > 1
    if event == "resumed":
        # A later `fit` of the same model begins where the one before ended.
        is_again = line["step"] and line["last_time"] is not None
    return f"{event} again" if is_again else event


class Marks:
    """Appends the marks of one group; nothing depends on them."""

    def __init__(self, group_dir: pathlib.Path) -> None:
        """Takes the group's directory, which need not be there yet."""
        self._path = group_dir / run_files.MARKS
        self._lines = run_files.LineFile(self._path)
        self._furthest, self._last = 0, ""
        self._fit: dict[str, int] = {}

    @property
    def advances(self) -> bool:
        """Whether new steps are made."""
        return self._last == "advancing"

    def resume(
        self, step: int, last: Mapping[str, Any] | None, *, fit: int = 1
    ) -> None:
        """Notes that training begins; `last` is the last line of its log.

        Only steps of the same `fit` of the process count as repeated.
        """
        before = last or {"step": 0, "time": None}
        self._fit = {"fit": fit} if fit > 1 else {}
        known = [
            mark.get("last_step", 0)
            for mark in run_events.read(self._path)
            if mark.get("fit", 1) == fit
        ]
        self._furthest = max([before["step"], *known])
        self._add(
            "resumed",
            step,
            last_step=before["step"],
            last_time=before["time"],
        )

    def see(self, step: int) -> None:
        """Takes in that a step was made."""
        if self.advances:
            return
        event = "repeating" if step <= self._furthest else "advancing"
        if event != self._last:
            self._add(event, step)

    def end(self, step: int) -> None:
        """Notes that training has ended."""
        self._add("ended", step)

    def _add(self, event: str, step: int, **details: object) -> None:
        self._last = event
        line = {"event": event, "time": time.time(), "step": step}
        line |= {**self._fit, **details}
        self._lines.append(line)


def of_groups(
    workdir: str | os.PathLike[str], groups: Iterable[int], *, until: float
) -> dict[int, Goodput]:
    """Returns the goodput of groups as their files have it; see `measure`."""
    run = directory.RunDirectory(workdir)
    events = [e for path in run.events() for e in run_events.read(path)]
    return {
        group: measure(
            [
                *(e for e in events if e.get("group", group) in (group, None)),
                *run_events.read(run.marks(group)),
            ],
            until=until,
        )
        for group in groups
    }
