"""Finds the tasks that are late, frozen, or there and yet do nothing.

TensorFlow misses most of them: it takes ten seconds to note a frozen peer and
never notes one that hangs, and a coordinator waits for its workers and ps
without a limit. A task cannot watch itself either: what hangs may hold Python's
lock. So the launcher looks at its processes, and at the progress they report.
"""

import collections
import dataclasses
import time
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any

from tfdistill.cluster import signs
from tfdistill.launcher import local_cluster
from tfdistill.system import processes

# A step may take so many times what the longest of the recent ones took. On a
# machine that suddenly has five times as much to do, no task is stuck yet.
_FACTOR = 10.0
# When no limit is known, as in callbacks, which may save and evaluate. The
# task's own watchdog (`TFDISTILL_STALL_TIMEOUT_SECS`) is there as well.
_UNKNOWN_SECS = 600.0
_NUM_RECENT = 500
# A retrace in the middle of training takes about what the first trace took.
_TRACE_FACTOR = 2.0
_FIRST_STEPS = {
    signs.STEP: signs.FIRST_STEP,
    signs.EVALUATION_STEP: signs.FIRST_EVALUATION_STEP,
    signs.PREDICTION_STEP: signs.FIRST_PREDICTION_STEP,
}
_OF_THE_USER = frozenset({signs.CALLBACKS, signs.EPOCH_END})
# Phases in which others may have to wait for a task for good reasons.
_FREE = _OF_THE_USER | {signs.IDLE}
# A server reports twice a second, whatever the model. While a server doesn't,
# its chief isn't stopped for what may be the server's fault.
_SUSPICIOUS_SECS = 2.0
# A task that a signal stopped for so long isn't expected to resume. A stop from
# a terminal or of a whole machine stops the launcher too; its longest tick is
# well below this.
_FROZEN_SECS = 1.5
# As the kernel names that state; "t" is a debugger's stop.
_STOPPED = "T"
# The steps of a group stand still while a worker that was lost comes back.
_RETURN_SECS = 60.0
_LONGEST_TICK_SECS = 1.0
# How often tasks without a report are probed, by a look at a local port.
_ASK_SECS = 0.5


class ProgressLimit:
    """Decides from a task's progress reports whether it is stuck.

    The limit for a phase is `stuck_secs`, or ten times the longest of the
    recent silences in that phase if that is more, so that slow steps and a
    busy machine are not taken for a hang; steps may take twice as long as the
    first of an epoch, too, as TensorFlow may trace again. A phase not seen
    before, and all that callbacks do, may take ten minutes, or ten times what
    it took before. A task that does not report, or is in no phase of the
    library's, is not judged.

    Times are seconds of any one clock, passed in.

    Attributes:
        phase: The phase that the task reported last; `IDLE` at first.
    """

    def __init__(self, *, stuck_secs: float) -> None:
        """Less than `stuck_secs` never counts as stuck; 0: nothing does."""
        self.phase = signs.IDLE
        self._stuck_secs = stuck_secs
        self._line: signs.Line | None = None
        self._changed = 0.0
        self._recent = collections.defaultdict[str, collections.deque[float]](
            lambda: collections.deque(maxlen=_NUM_RECENT)
        )

    def note(self, line: signs.Line | None, *, now: float) -> None:
        """Takes in the task's present report; None if there is none."""
        if line is None or line == self._line:
            return
        if self._line is not None:
            self._recent[self.phase].append(now - self._changed)
        self._line, self.phase, self._changed = line, line.phase, now

    def excuse(self, *, now: float) -> None:
        """Forgives the silence so far, which others have caused."""
        self._changed = now

    def silent_secs(self, *, now: float) -> float:
        """Returns the time since the last change."""
        return now - self._changed

    def limit_secs(self) -> float:
        """Returns the silence that the present phase allows."""
        phase = self.phase
        if phase == signs.IDLE or not self._stuck_secs:
            return float("inf")
        longest = self._longest(phase)
        if phase in _OF_THE_USER or not longest:
            return max(_UNKNOWN_SECS, _FACTOR * longest, self._stuck_secs)
        first = self._longest(_FIRST_STEPS.get(phase, ""))
        return max(self._stuck_secs, _FACTOR * longest, _TRACE_FACTOR * first)

    def is_stuck(self, *, now: float) -> bool:
        """Whether the task has been silent for longer than that."""
        return self.silent_secs(now=now) > self.limit_secs()

    def _longest(self, phase: str) -> float:
        return max(self._recent[phase], default=0.0)


@dataclasses.dataclass(frozen=True)
class Finding:
    """What must be killed: a task, or without one the whole group.

    `event` is the one of `run_events` that has these details.
    """

    event: str
    task: str | None
    reason: str
    details: Mapping[str, Any]


class TaskWatch:
    """Watches the tasks of one attempt to run a group.

    Seconds in which the launcher itself did not run do not count: a paused
    machine, or one too busy for it, would make every task look dead.
    """

    def __init__(
        self,
        tasks: Mapping[str, local_cluster.Task],
        *,
        topology: local_cluster.LocalCluster,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins with the start of the tasks."""
        self._ready_paths = {n: task.ready_path for n, task in tasks.items()}
        # Addresses of tasks that have reported nothing so far. They may have
        # met by the script's own strategy, which listens there.
        self._silent = {
            name: task.cluster.address
            for name, task in tasks.items()
            if task.cluster.address and len(tasks) > 1
        }
        self._asked, self._listening = 0.0, set[str]()
        self._start_secs = topology.start_timeout_secs
        self._stuck_secs = topology.stuck_secs
        self._servers = {
            name
            for name, task in tasks.items()
            if topology.ps_per_group and task.cluster.task_type != "chief"
        }
        self._clock, self._read, self._now = clock, clock(), 0.0
        self._has_started = not self._start_secs
        # Since when a worker is gone, or a task is stopped.
        self._lost: dict[str, float] = {}
        self._stopped: dict[str, float] = {}
        self._progress = {name: self._new_watch() for name in tasks}

    def _new_watch(self) -> ProgressLimit:
        return ProgressLimit(stuck_secs=self._stuck_secs)

    def note_end(self, name: str) -> None:
        """Takes in that a worker is gone, and will be started again."""
        self._lost[name] = self._now
        self._progress[name] = self._new_watch()

    def look(self, running: Mapping[str, int | None]) -> list[Finding]:
        """Returns what must be killed, and why.

        `running` are the process ids, as far as they are known, of the tasks
        that have not ended, by name.
        """
        read = self._clock()
        self._now += min(read - self._read, _LONGEST_TICK_SECS)
        self._read = read
        for name in running:
            line = signs.read_progress(self._ready_paths[name])
            self._progress[name].note(line, now=self._now)
        self._ask_silent(running)
        trainers = running.keys() - self._servers
        self._excuse(trainers, running)
        found = [*self._late(running), *self._frozen(running)]
        found += [
            self._stuck([name], task=name)
            for name in self._servers.intersection(running)
            if self._is_stuck(name)
        ]
        if any(map(self._is_stuck, trainers)):
            found.append(self._stuck(trainers))
        return found

    def _is_stuck(self, name: str) -> bool:
        return self._progress[name].is_stuck(now=self._now)

    def _silent_secs(self, name: str) -> float:
        return self._progress[name].silent_secs(now=self._now)

    def _late(self, running: Iterable[str]) -> Iterable[Finding]:
        """Yields, once, that tasks are not connected within the time limit."""
        if self._has_started:
            return
        late = [
            name
            for name in running
            if not self._ready_paths[name].exists()
            and name not in self._listening
        ]
        in_time = self._now < self._start_secs
        # Once all are there, too: one that is lost later may come back.
        self._has_started = not late or not in_time
        if in_time or not late:
            return
        absent = [name for name in late if not self._has_appeared(name)]
        what = "did not start" if absent else "started but did not connect"
        reason = (
            f"{', '.join(absent or late)} {what} within {self._start_secs:g} "
            "s. Check the log; raise --start-timeout-secs if start-up is slow, "
            "or set it to 0 if the script never calls tfdistill.make_strategy."
        )
        yield Finding("late", None, reason, {"reason": reason})

    def never_met(self) -> str | None:
        """Returns a warning if several tasks have ended and none appeared."""
        if (
            not self._start_secs
            or len(self._ready_paths) == 1
            or any(map(self._has_appeared, self._ready_paths))
        ):
            return None
        return (
            "no task called tfdistill.make_strategy, so each task trained on "
            "its own, if at all. Call it before any other TensorFlow operation "
            "(docs/your_script.md). If the script doesn't use tfdistill, pass "
            "--start-timeout-secs=0."
        )

    def _has_appeared(self, name: str) -> bool:
        return name in self._listening or self._has_spoken(name)

    def _has_spoken(self, name: str) -> bool:
        path = self._ready_paths[name]
        return path.exists() or signs.found(path, signs.STARTING)

    def _ask_silent(self, running: Iterable[str]) -> None:
        """Notes tasks that listen on their address but never reported."""
        if self._now - self._asked < _ASK_SECS:
            return
        self._asked = self._now
        for name in self._silent.keys() & set(running):
            if self._has_spoken(name):
                del self._silent[name]
            elif processes.ask(self._silent[name]) is processes.Answer.OPEN:
                del self._silent[name]
                self._listening.add(name)

    def _frozen(self, running: Mapping[str, int | None]) -> Iterable[Finding]:
        for name, pid in running.items():
            if pid is None or processes.state_of(pid) != _STOPPED:
                self._stopped.pop(name, None)
                continue
            secs = self._now - self._stopped.setdefault(name, self._now)
            if secs >= _FROZEN_SECS and self._stuck_secs:
                reason = (
                    f"{name} was frozen (stopped by a signal) for {secs:.1f} "
                    "s, so it was killed"
                )
                yield Finding("frozen", name, reason, {"silent_secs": secs})

    def _excuse(
        self, trainers: Collection[str], running: Collection[str]
    ) -> None:
        """Forgives trainers that wait for another which may take its time."""
        slow = {
            name
            for name, since in self._lost.items()
            if self._now - since < _RETURN_SECS
            and self._progress[name].phase != signs.SERVING
        }
        for name in running:
            phase = self._progress[name].phase
            if name in trainers:
                if phase in _FREE and not self._is_stuck(name):
                    slow.add(name)
            elif phase == signs.SERVING:
                if self._silent_secs(name) > _SUSPICIOUS_SECS:
                    slow.add(name)
        for name in trainers:
            if slow - {name}:
                self._progress[name].excuse(now=self._now)

    def _stuck(self, names: Iterable[str], task: str | None = None) -> Finding:
        silences = {name: self._silent_secs(name) for name in sorted(names)}
        longest = max(silences, key=lambda name: silences[name])
        said = ", ".join(
            f"{name} {secs:.1f} s ({self._progress[name].phase})"
            for name, secs in silences.items()
        )
        reason = (
            f"no progress, so it was killed; silent for: {said}. If steps can "
            "take longer, raise --stuck-secs (0 for no limit)"
        )
        details = {
            "silent_secs": silences[longest],
            "phase": self._progress[longest].phase,
        }
        return Finding("stuck", task, reason, details)
