"""One round of faults against a run: injects, watches, waits for recovery."""

import collections
import contextlib
import json
import pathlib
import threading
import time
from collections.abc import Callable
from collections.abc import Mapping
from concurrent import futures
from typing import Any

import psutil

from benchmarks.punish import faults
from benchmarks.punish import run_view
from benchmarks.punish import watch
from tfdistill.system import programs

_LOOK_SECS = 0.2
# The first refreshes and backups are traced, which takes a second under load.
_FIRST_STEPS = 20
_TELL_SECS = 30.0
# Of faults that last, such as a full disk, so many at a time.
_MAX_THREADS = 16
# A group has no task for a moment when it starts again.
_TARGET_LIMIT_SECS = 10.0
# A restart imports TensorFlow and traces: seconds, more on a busy machine. Then
# a group that learns from predictions must catch up.
_RECOVERY_LIMIT_SECS = 180.0
_ANSWERS_LIMIT_SECS = 600.0
_LEFT_BEHIND_SECS = 15.0


class Round:
    """Punishes one run and says how it took it."""

    def __init__(
        self,
        view: run_view.RunView,
        options: programs.Options,
        say: Callable[[str], None],
    ) -> None:
        """Touches nothing but the run's `punish` directory.

        Args:
            view: The run.
            options: The soak's: faults, seed, minutes and mtbf_secs.
            say: Takes a line for the user.
        """
        self._view = view
        self._options = options
        self._say = say
        self._watch = watch.Watch(view)
        groups = range(view.num_groups)
        self._steps = [-1 for _ in groups]
        # Of each group, its furthest step, and when it got there.
        self._furthest = [(0, time.monotonic()) for _ in groups]
        self._some_are_over = False
        self._stopping = threading.Event()
        self._log: list[dict[str, Any]] = []
        self._directory = pathlib.Path(view.workdir, "punish")
        self._directory.mkdir(exist_ok=True)

    def run(self) -> dict[str, Any]:
        """Injects all faults and returns the report."""
        with futures.ThreadPoolExecutor(_MAX_THREADS) as pool:
            observer = pool.submit(self._observe)
            try:
                self._wait_for_training()
                start = time.time()
                self._inject_all(pool)
                end = time.time()
                self._wait_for_recovery()
                self._wait_for_answers()
            finally:
                self._stopping.set()
            observer.result()
        for group, _ in enumerate(self._steps):
            self._watch.check_mixes(group)
        for name, pid in self._view.left_behind(_LEFT_BEHIND_SECS).items():
            self._watch.tell(f"{name} was replaced, yet process {pid} lives")
        return self._report(start, end)

    # ---- observation, in a thread of its own ----

    def _observe(self) -> None:
        while not self._stopping.wait(_LOOK_SECS):
            self._view.tasks()
            self._watch.look_at_backups()
            for group, record in self._watch.look_at_logs():
                self._see(group, record)
            for event in self._view.events():
                if event.get("event") in ("done", "stopped"):
                    self._some_are_over = True
            self._watch.look_at_versions()
            self._watch.check_teachers()

    def _see(self, group: int, record: Mapping[str, Any]) -> None:
        step, now = record.get("step", -1), time.monotonic()
        self._steps[group] = step
        furthest, when = self._furthest[group]
        if step <= furthest:
            return
        if now - when > _RECOVERY_LIMIT_SECS:
            self._watch.tell(
                f"group {group} was at step {furthest} for {now - when:.0f} s"
            )
        self._furthest[group] = (step, now)

    # ---- injection ----

    def _wait_for_training(self) -> None:
        """Waits until all groups step."""
        if not self._wait_for(lambda: min(self._steps) >= _FIRST_STEPS):
            raise run_view.NoRunError(
                "the run must train; no group, or not all of them, made a step "
                f"in {_RECOVERY_LIMIT_SECS:g} s. Look at its logs."
            )

    def _inject_all(self, pool: futures.Executor) -> None:
        """Injects each fault when it is due, whatever others still do."""
        start, options = time.monotonic(), self._options
        end, told = start + options.minutes * 60, start
        due = faults.plan(
            options.faults.split(","),
            num_groups=self._view.num_groups,
            seed=options.seed,
            duration_secs=options.minutes * 60,
            mtbf_secs=options.mtbf_secs,
        )
        running = []
        while (due or time.monotonic() < end) and self._view.tasks():
            now = time.monotonic()
            while due and now >= start + due[0].due_secs:
                running.append(pool.submit(self._inject, due.pop(0)))
            if now - told >= _TELL_SECS:
                told = now
                self._say(f"{now - start:.0f} s: at the steps {self._steps}")
            time.sleep(_LOOK_SECS)
        for injection in running:
            injection.result()

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

    def _inject(self, injection: faults.Injection) -> None:
        group, start = injection.group, time.time()
        step = self._steps[group]
        if injection.fault == "disk_full":
            self._watch.filled(group)
        outcome = self._outcome(injection)
        if outcome.damaged is not None:
            self._watch.damaged(*outcome.damaged)
        entry: dict[str, Any] = {
            "number": injection.number,
            "fault": injection.fault,
            "group": group,
            "target": outcome.target,
            "step": step,
            "time": start,
            "secs": time.time() - start,
            "halts": outcome.halts,
        }
        self._log.append(entry)
        others = [e for e in self._log if e["group"] == group and e["halts"]]
        if outcome.violation:
            self._watch.tell(outcome.violation)
        if outcome.suspicion and not any(
            other["time"] > start - _RECOVERY_LIMIT_SECS for other in others
        ):
            self._watch.tell(outcome.suspicion)
        with (self._directory / "log.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")
        self._say(_in_words(entry))

    def _outcome(self, injection: faults.Injection) -> faults.Outcome:
        """Injects a fault, once there is something that it can hit."""
        inject = faults.FAULTS[injection.fault]
        deadline = time.monotonic() + _TARGET_LIMIT_SECS
        while True:
            outcome = faults.Outcome()
            with contextlib.suppress(psutil.NoSuchProcess):  # Ended just now.
                outcome = inject(self._view, injection)
            if outcome.target or time.monotonic() > deadline:
                return outcome
            time.sleep(_LOOK_SECS)

    def _wait_for_recovery(self) -> None:
        """Waits until all groups have got on, beyond where they were."""
        due = [step + 1 for step, _ in self._furthest]

        def are_past() -> bool:
            pairs = zip(self._furthest, due, strict=True)
            return all(step >= least for (step, _), least in pairs)

        if not self._wait_for(lambda: self._some_are_over or are_past()):
            self._watch.tell(
                f"not all groups came back within {_RECOVERY_LIMIT_SECS:g} s"
            )

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

    def _report(self, start: float, end: float) -> dict[str, Any]:
        names = [entry["fault"] for entry in self._log]
        return {
            "seed": self._options.seed,
            "start": start,
            "secs": end - start,
            "injected": len(self._log),
            "without_target": sum(not entry["target"] for entry in self._log),
            "by_fault": dict(sorted(collections.Counter(names).items())),
            "versions_verified": self._watch.num_versions,
            "mixes_checked": self._watch.num_mixes,
            "log_lines_checked": self._watch.num_records,
            "violations": self._watch.violations,
        }


def _in_words(entry: Mapping[str, Any]) -> str:
    return (
        f"{entry['number']}: {entry['fault']} of group {entry['group']} at "
        f"step {entry['step']}: {entry['target'] or 'nothing to hit'}"
    )
