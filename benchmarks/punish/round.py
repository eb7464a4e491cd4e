"""One round of faults against a run: injects, waits for recovery, measures.

Times are seconds of any one clock, passed in.
"""

import dataclasses
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

from benchmarks.punish import faults
from benchmarks.punish import run_view
from benchmarks.punish import watch


@dataclasses.dataclass
class Span:
    """A time during which a group was under a fault; open while `end` is None.

    Attributes:
        start: When the fault was injected.
        end: When the group was past it.
    """

    start: float
    end: float | None = None


class Timeline:
    """The steps of one group, as they were seen, and its faults."""

    def __init__(self, spans: list[Span] | None = None) -> None:
        """Has seen nothing.

        Args:
            spans: The group's faults, where another timeline has them too.
        """
        self._samples: list[tuple[float, int]] = []
        self.spans: list[Span] = [] if spans is None else spans

    @property
    def step(self) -> int:
        """The last step seen, or -1."""
        return self._samples[-1][1] if self._samples else -1

    def see(self, step: int, *, now: float) -> None:
        """Notes the group's step; only a change of it counts."""
        if step != self.step:
            self._samples.append((now, step))

    def begin_fault(self, *, now: float) -> Span:
        """Notes that a fault hits the group."""
        span = Span(now)
        self.spans.append(span)
        return span

    def num_steps(self, start: float, end: float) -> int:
        """Returns the steps done in a time; steps done again count again.

        A step is done between two sights of it. Where only a part of that
        lies in the time, or the group had a fault meanwhile, it does not
        count.
        """
        return sum(
            step - before
            for (then, before), (now, step) in self._pairs(start, end)
            if step > before
        )

    def clear_secs(self, start: float, end: float) -> float:
        """Returns the seconds of a time in which the group had no fault."""
        return sum(last - first for first, last in self._clear(start, end))

    def longest_gap(self, start: float, end: float) -> float:
        """Returns the longest time between two steps without a fault.

        The time from the last step to `end` counts too.
        """
        longest = 0.0
        for first, last in self._clear(start, end):
            times = [t for t, _ in self._samples if first <= t <= last]
            marks = [first, *times, last]
            gaps = [b - a for a, b in zip(marks, marks[1:], strict=False)]
            longest = max([longest, *gaps])
        return longest

    def _pairs(
        self, start: float, end: float
    ) -> Iterator[tuple[tuple[float, int], tuple[float, int]]]:
        pairs = zip(self._samples, self._samples[1:], strict=False)
        spans = list(self._clear(start, end))
        for before, after in pairs:
            if any(a <= before[0] and after[0] <= b for a, b in spans):
                yield before, after

    def _clear(self, start: float, end: float) -> Iterator[tuple[float, float]]:
        """Yields the parts of a time that no fault covers."""
        for span in sorted(self.spans, key=lambda span: span.start):
            last = end if span.end is None else span.end
            if last <= start or span.start >= end:
                continue
            if span.start > start:
                yield start, span.start
            start = max(start, last)
        if start < end:
            yield start, end


_LOOK_SECS = 0.05
_SCAN_SECS = 0.5
# A restart imports TensorFlow and traces: seconds, more on a busy machine.
RECOVERY_LIMIT_SECS = 180.0
_LEFT_BEHIND_SECS = 15.0
# Groups log what they have refused every few steps.
_COUNTED_LIMIT_SECS = 30.0


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
        self._lines = [Timeline() for _ in range(view.num_groups)]
        # Finer than the groups' logs, but no step numbers.
        self._beats = [Timeline(line.spans) for line in self._lines]
        # Of each group, its last step before each of its starts, and the first.
        self._resumes: list[list[tuple[int, int]]] = [[] for _ in self._lines]
        self._events: list[dict[str, Any]] = []
        self._over: set[int] = set()
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
            for group, record in self._watch.look_at_logs():
                if isinstance(record.get("step"), int):
                    with self._lock:
                        self._see(group, record, now)
            for group, line in enumerate(self._beats):
                beat = self._view.beat(group)
                if beat is not None:
                    line.see(beat, now=now)
            for event in self._view.events():
                self._events.append(event)
                if event.get("event") in ("done", "stopped"):
                    self._over.add(event["group"])
                    with self._lock:  # No more steps are due from it.
                        self._lines[event["group"]].begin_fault(now=now)
            if now - scanned >= _SCAN_SECS:
                scanned = now
                self._watch.look_at_versions()
                self._watch.check_teachers()

    def _see(self, group: int, record: Mapping[str, Any], now: float) -> None:
        line = self._lines[group]
        if record.get("event") == "start":
            # What a group had logged last is what it must get past.
            self._resumes[group].append((line.step, record["step"]))
        line.see(record["step"], now=now)

    # ---- injection ----

    def _calm(self) -> tuple[float, float]:
        """Waits until all groups step, then for the calm time."""
        deadline = time.monotonic() + RECOVERY_LIMIT_SECS
        while min(line.step for line in self._lines) < 1:
            if time.monotonic() > deadline or not self._view.tasks():
                raise run_view.NoRunError(
                    "the run must train; no group, or not all of them, made a "
                    f"step in {RECOVERY_LIMIT_SECS:g} s. Look at its logs."
                )
            time.sleep(_LOOK_SECS)
        start = time.monotonic()
        self._say(f"calm for {self._options.calm_secs:g} s, to know the pace")
        self._wait_until(start + self._options.calm_secs)
        return start, time.monotonic()

    def _wait_until(self, when: float) -> bool:
        """Returns False where the run ends before that."""
        while time.monotonic() < when:
            if not self._view.tasks():
                return False
            time.sleep(_LOOK_SECS)
        return bool(self._view.tasks())

    def _inject(self, injection: faults.Injection) -> None:
        line = self._lines[injection.group]
        start = time.monotonic()
        with self._lock:
            span = line.begin_fault(now=start)
            step, before = line.step, len(self._resumes[injection.group])
        num_refused = self._watch.num_refused(injection.group)
        inject, _ = faults.FAULTS[injection.fault]
        outcome = inject(self._view, injection)
        if outcome.damaged is not None:
            self._watch.damaged(*outcome.damaged)
        if outcome.violation:
            self._watch.tell(outcome.violation)
        entry: dict[str, Any] = {
            "number": injection.number,
            "fault": injection.fault,
            "group": injection.group,
            "target": outcome.target,
            "time": time.time(),
            "monotonic": start,
            "step": step,
        }
        if outcome.refused:
            entry["refused"] = self._wait_for_count(
                injection.group, num_refused
            )
        if outcome.ends_group:
            entry |= self._wait_for_recovery(injection.group, before, start)
        with self._lock:
            span.end = time.monotonic()
        entry["secs"] = span.end - start
        self._log.append(entry)
        with (self._directory / "log.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")
        self._say(_in_words(entry))

    def _wait_for_recovery(
        self, group: int, num_resumes: int, start: float
    ) -> dict[str, Any]:
        """Waits until a group is past the step at which it ended."""
        while time.monotonic() - start < RECOVERY_LIMIT_SECS:
            with self._lock:
                step = self._lines[group].step
                resumes = self._resumes[group][num_resumes:]
            if resumes and step > max(failed for failed, _ in resumes):
                failed, resumed = resumes[-1]
                names = ("exit", "frozen", "stuck")
                return {
                    "recovery_secs": time.monotonic() - start,
                    "redone_steps": max(0, failed - resumed),
                    "detection_secs": self._first_event(group, start, names),
                }
            if not self._view.tasks():
                break
            time.sleep(_LOOK_SECS)
        self._watch.tell(
            f"group {group} was not past the step of a fault within "
            f"{RECOVERY_LIMIT_SECS:g} s"
        )
        return {"recovery_secs": None}

    def _wait_for_count(self, group: int, before: int) -> int:
        """Waits until a group says that it has refused messages; how many."""
        deadline = time.monotonic() + _COUNTED_LIMIT_SECS
        while (count := self._watch.num_refused(group) - before) <= 0:
            if time.monotonic() > deadline or not self._view.tasks():
                self._watch.tell(
                    f"group {group} did not count any of the messages that it "
                    "must refuse"
                )
                break
            time.sleep(_LOOK_SECS)
        return count

    def _wait_for_answers(self) -> None:
        """Waits until all groups that learn from predictions do so again.

        As long as the one that is behind comes nearer, there is time.
        """
        first = [self._watch.num_answers(g) for g in range(len(self._lines))]
        deadline, apart = 0.0, math.inf
        for group, before in enumerate(first):
            while self._watch.num_answers(group) == before is not None:
                if self._over or not self._view.tasks():
                    return  # Who has ended answers nobody.
                steps = [line.step for line in self._lines]
                if max(steps) - min(steps) < apart:
                    apart = max(steps) - min(steps)
                    deadline = time.monotonic() + RECOVERY_LIMIT_SECS
                if time.monotonic() > deadline:
                    self._watch.tell(
                        f"group {group} had no answer of its peers within "
                        f"{RECOVERY_LIMIT_SECS:g} s, though it came no nearer"
                    )
                    break
                time.sleep(_LOOK_SECS)

    def _first_event(
        self, group: int, since: float, names: Sequence[str]
    ) -> float | None:
        for event in list(self._events):
            if (
                event.get("group") == group
                and event.get("event") in names
                and event.get("monotonic", 0.0) >= since
            ):
                return float(event["monotonic"]) - since
        return None

    # ---- report ----

    def _report(
        self, calm: tuple[float, float], start: float, end: float
    ) -> dict[str, Any]:
        secs = calm[1] - calm[0]
        paces = [line.num_steps(*calm) / secs for line in self._lines]
        done = sum(line.num_steps(start, end) for line in self._lines)
        due = sum(
            pace * line.clear_secs(start, end)
            for pace, line in zip(paces, self._lines, strict=True)
        )
        recovered = [e for e in self._log if "recovery_secs" in e]
        report = {
            "seed": self._options.seed,
            "secs": end - start,
            "injected": len(self._log),
            "by_fault": _counts(self._log),
            "calm_steps_per_second": paces,
            "steps_of_groups_without_fault": done / due if due else None,
            "longest_step_gap_secs": max(
                line.longest_gap(start, end) for line in self._beats
            ),
            "detection_secs": _median(recovered, "detection_secs"),
            "recovery_secs": _median(recovered, "recovery_secs"),
            "redone_steps": _median(recovered, "redone_steps"),
            "versions_verified": self._watch.num_versions,
            "mixes_checked": self._watch.num_mixes,
            "log_lines_checked": self._watch.num_records,
            "violations": self._watch.violations,
        }
        path = self._directory / "report.json"
        path.write_text(json.dumps(report, indent=2) + "\n")
        return report


def _counts(log: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    names = [entry["fault"] for entry in log]
    return {name: names.count(name) for name in sorted(set(names))}


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
