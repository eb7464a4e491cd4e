"""One round of faults against a run: injects, waits for recovery, measures.

Times are seconds of any one clock, passed in.
"""

import collections
import dataclasses
import itertools
import json
import math
import pathlib
import statistics
import threading
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import psutil

from benchmarks.punish import faults
from benchmarks.punish import run_view
from benchmarks.punish import watch

_LOOK_SECS = 0.05
_SCAN_SECS = 0.5
# A restart imports TensorFlow and traces: seconds, more on a busy machine. Then
# a group that learns from predictions must catch up.
_RECOVERY_LIMIT_SECS = 180.0
_ANSWERS_LIMIT_SECS = 600.0
_LEFT_BEHIND_SECS = 15.0
# Groups log what they have refused every few steps.
_COUNTED_LIMIT_SECS = 30.0


class _Beats:
    """The progress of one group as it was seen, and when it had a fault."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []
        # Of each fault, its start and its end; infinite while it lasts.
        self.faults: list[list[float]] = []

    def see(self, count: int, *, now: float) -> None:
        """Notes the group's count; only a change of it is one."""
        if not self._seen or count != self._seen[-1][1]:
            self._seen.append((now, count))

    def clear(self, start: float, end: float) -> Iterator[tuple[float, float]]:
        """Yields the parts of a time that no fault covers."""
        for begun, past in sorted(self.faults):
            if begun >= end:
                break
            if begun > start:
                yield start, begun
            start = max(start, past)
        if start < end:
            yield start, end

    def number(self, start: float, end: float) -> int:
        """Returns how often the group got on, while it had no fault."""
        spans = list(self.clear(start, end))
        return sum(
            max(0, count - before)
            for (then, before), (now, count) in itertools.pairwise(self._seen)
            if any(first <= then and now <= last for first, last in spans)
        )

    def longest_gap(self, start: float, end: float) -> float:
        """Returns the longest time without progress, nor a fault."""
        longest = 0.0
        for first, last in self.clear(start, end):
            times = [t for t, _ in self._seen if first <= t <= last]
            for one, other in itertools.pairwise([first, *times, last]):
                longest = max(longest, other - one)
        return longest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How to punish.

    Attributes:
        faults: Names of `faults.FAULTS`.
        seed: The same seed gives the same faults in the same order.
        minutes: Length of the time with faults.
        every_secs: Mean time between two faults.
        calm_secs: Time before them, in which the paces are measured.
    """

    faults: Sequence[str]
    seed: int
    minutes: float
    every_secs: float
    calm_secs: float


class Round:
    """Punishes one run and says how it took it."""

    def __init__(
        self,
        view: run_view.RunView,
        options: Options,
        say: Callable[[str], None],
    ) -> None:
        """Touches nothing but the run's `punish` directory.

        Args:
            view: The run.
            options: How to punish it.
            say: Takes a line for the user.
        """
        self._view = view
        self._options = options
        self._say = say
        self._watch = watch.Watch(view)
        groups = range(view.num_groups)
        self._beats = [_Beats() for _ in groups]
        self._steps = [-1 for _ in groups]
        # Of each group, its last step before each of its starts, and the first.
        self._resumes: list[list[tuple[int, int]]] = [[] for _ in groups]
        self._events: list[dict[str, Any]] = []
        self._some_are_over = False
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._log: list[dict[str, Any]] = []
        self._directory = pathlib.Path(view.workdir, "punish")
        self._directory.mkdir(exist_ok=True)

    def run(self) -> dict[str, Any]:
        """Injects all faults and returns the report."""
        options = self._options
        observer = threading.Thread(target=self._observe, name="punish-watch")
        observer.start()
        try:
            calm = self._calm()
            start = time.monotonic()
            for injection in faults.plan(
                options.faults,
                num_groups=self._view.num_groups,
                seed=options.seed,
                duration_secs=options.minutes * 60,
                every_secs=options.every_secs,
            ):
                if not self._wait_until(start + injection.due_secs):
                    break
                self._inject(injection)
            self._wait_until(start + options.minutes * 60)
            end = time.monotonic()
            self._wait_for_answers()
        finally:
            self._stopping.set()
            observer.join()
        for group, resumes in enumerate(self._resumes):
            self._watch.check_mixes(group, [step for _, step in resumes])
        for name, pid in self._view.left_behind(_LEFT_BEHIND_SECS).items():
            self._watch.tell(f"{name} was replaced, yet process {pid} lives")
        return self._report(calm, start, end)

    # ---- observation, in a thread of its own ----

    def _observe(self) -> None:
        scanned = 0.0
        while not self._stopping.wait(_LOOK_SECS):
            self._view.tasks()
            now = time.monotonic()
            with self._lock:
                for group, record in self._watch.look_at_logs():
                    if record.get("event") == "start":
                        # What it had logged last is what it must get past.
                        resume = self._steps[group], record["step"]
                        self._resumes[group].append(resume)
                    self._steps[group] = record.get("step", -1)
                for group, beats in enumerate(self._beats):
                    if (count := self._view.beat(group)) is not None:
                        beats.see(count, now=now)
                for event in self._view.events():
                    self._events.append(event)
                    if event.get("event") in ("done", "stopped"):
                        self._some_are_over = True
                        # No more progress is due from it.
                        self._beats[event["group"]].faults.append(
                            [now, math.inf]
                        )
            if now - scanned >= _SCAN_SECS:
                scanned = now
                self._watch.look_at_versions()
                self._watch.check_teachers()

    # ---- injection ----

    def _calm(self) -> tuple[float, float]:
        """Waits until all groups step, then for the calm time."""
        if not self._wait_for(lambda: min(self._steps) >= 1):
            raise run_view.NoRunError(
                "the run must train; no group, or not all of them, made a step "
                f"in {_RECOVERY_LIMIT_SECS:g} s. Look at its logs."
            )
        start = time.monotonic()
        self._say(f"calm for {self._options.calm_secs:g} s, to know the pace")
        self._wait_until(start + self._options.calm_secs)
        return start, time.monotonic()

    def _wait_for(
        self,
        condition: Callable[[], Any],
        limit_secs: float = _RECOVERY_LIMIT_SECS,
    ) -> Any:
        """Returns what a condition comes to; false if in no time."""
        deadline = time.monotonic() + limit_secs
        while not (found := condition()):
            if time.monotonic() > deadline or not self._view.tasks():
                break
            time.sleep(_LOOK_SECS)
        return found

    def _wait_until(self, when: float) -> bool:
        """Returns False if the run ends before that."""
        while time.monotonic() < when and self._view.tasks():
            time.sleep(_LOOK_SECS)
        return bool(self._view.tasks())

    def _inject(self, injection: faults.Injection) -> None:
        group, start = injection.group, time.monotonic()
        fault = [start, math.inf]
        with self._lock:
            self._beats[group].faults.append(fault)
            step, num_resumes = self._steps[group], len(self._resumes[group])
        num_refused = self._watch.num_refused(group)
        inject, _ = faults.FAULTS[injection.fault]
        try:
            outcome = inject(self._view, injection)
        except psutil.NoSuchProcess:  # It ended just now.
            outcome = faults.Outcome()
        if outcome.damaged is not None:
            self._watch.damaged(*outcome.damaged)
        if outcome.violation:
            self._watch.tell(outcome.violation)
        entry: dict[str, Any] = {
            "number": injection.number,
            "fault": injection.fault,
            "group": group,
            "target": outcome.target,
            "time": time.time(),
            "monotonic": start,
            "step": step,
        }
        if outcome.refused:
            entry["refused"] = self._wait_for(
                lambda: self._watch.num_refused(group) - num_refused,
                _COUNTED_LIMIT_SECS,
            )
            if not entry["refused"]:
                self._watch.tell(
                    f"group {group} did not count any of the messages that it "
                    "must refuse"
                )
        if outcome.ends_group:
            entry |= self._recovered(group, num_resumes, start)
        fault[1] = time.monotonic()
        entry["secs"] = fault[1] - start
        self._log.append(entry)
        with (self._directory / "log.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")
        self._say(_in_words(entry))

    def _recovered(
        self, group: int, num_resumes: int, start: float
    ) -> dict[str, Any]:
        """Waits until a group is past the step at which it ended."""

        def is_past() -> bool:
            with self._lock:
                resumes = self._resumes[group][num_resumes:]
                failed = max((step for step, _ in resumes), default=-1)
                return bool(resumes) and self._steps[group] > failed

        if not self._wait_for(is_past):
            self._watch.tell(
                f"group {group} was not past the step of a fault within "
                f"{_RECOVERY_LIMIT_SECS:g} s"
            )
            return {"recovery_secs": None}
        failed, resumed = self._resumes[group][-1]
        noticed = [
            event["monotonic"] - start
            for event in list(self._events)
            if event.get("group") == group
            and event.get("event") in ("exit", "frozen", "stuck")
            and event.get("monotonic", 0.0) >= start
        ]
        return {
            "recovery_secs": time.monotonic() - start,
            "redone_steps": max(0, failed - resumed),
            "detection_secs": min(noticed, default=None),
        }

    def _wait_for_answers(self) -> None:
        """Waits until all groups that learn from predictions do so again."""
        for group, _ in enumerate(self._steps):
            if not self._wait_for(
                self._is_answered(group), _ANSWERS_LIMIT_SECS
            ):
                self._watch.tell(
                    f"group {group} had no answer of its peers within "
                    f"{_ANSWERS_LIMIT_SECS:g} s"
                )

    def _is_answered(self, group: int) -> Callable[[], bool]:
        before = self._watch.num_answers(group)
        # Who has ended answers nobody.
        return lambda: (
            before is None
            or self._some_are_over
            or self._watch.num_answers(group) != before
        )

    # ---- report ----

    def _report(
        self, calm: tuple[float, float], start: float, end: float
    ) -> dict[str, Any]:
        secs = calm[1] - calm[0]
        paces = [beats.number(*calm) / secs for beats in self._beats]
        done = sum(beats.number(start, end) for beats in self._beats)
        due = sum(
            pace * sum(last - first for first, last in beats.clear(start, end))
            for pace, beats in zip(paces, self._beats, strict=True)
        )
        names = [entry["fault"] for entry in self._log]
        report = {
            "seed": self._options.seed,
            "secs": end - start,
            "injected": len(self._log),
            "by_fault": dict(sorted(collections.Counter(names).items())),
            "steps_of_groups_without_fault": done / due if due else None,
            "longest_step_gap_secs": max(
                beats.longest_gap(start, end) for beats in self._beats
            ),
            "detection_secs": _median(self._log, "detection_secs"),
            "recovery_secs": _median(self._log, "recovery_secs"),
            "redone_steps": _median(self._log, "redone_steps"),
            "versions_verified": self._watch.num_versions,
            "mixes_checked": self._watch.num_mixes,
            "log_lines_checked": self._watch.num_records,
            "violations": self._watch.violations,
        }
        path = self._directory / "report.json"
        path.write_text(json.dumps(report, indent=2) + "\n")
        return report


def _median(log: Sequence[Mapping[str, Any]], key: str) -> float | None:
    found = [entry[key] for entry in log if entry.get(key) is not None]
    return statistics.median(found) if found else None


def _in_words(entry: Mapping[str, Any]) -> str:
    text = (
        f"{entry['number']}: {entry['fault']} of group {entry['group']} at "
        f"step {entry['step']}: {entry['target'] or 'nothing to hit'}"
    )
    if "refused" in entry:
        text += f"; {entry['refused']} messages refused"
    if entry.get("recovery_secs") is not None:
        text += (
            f"; past it after {entry['recovery_secs']:.1f} s, "
            f"{entry['redone_steps']} steps done again"
        )
    return text
