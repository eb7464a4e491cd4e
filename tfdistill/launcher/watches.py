"""Finds the tasks that are late, frozen, or there and yet do nothing.

TensorFlow misses most of them: it takes ten seconds to note a frozen peer and
never notes one that hangs, and a coordinator waits for its workers and ps
without a limit. A task cannot watch itself either: what hangs may hold Python's
lock. So the launcher looks at its processes and at the progress they report.

A launcher that judges by silence must not count the seconds in which it was
itself asleep: a paused machine, or one too busy to let the launcher run, would
make every task look dead.
"""

import collections
import pathlib
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence

from tfdistill.cluster import signs
from tfdistill.launcher import local_cluster
from tfdistill.launcher import task_process


class StartLimit:
    """Judges whether the tasks of one group start within the time limit.

    The limit applies twice: from the launch until the first task appears, and
    from then until all are connected. Tasks that have ended are not waited
    for. Times are seconds of any one clock, passed in.
    """

    def __init__(
        self,
        ready_files: Mapping[str, pathlib.Path],
        *,
        limit_secs: float,
        now: float,
    ) -> None:
        self._ready_files = dict(ready_files)
        self._limit_secs = limit_secs
        self._launch = now
        self._appeared: float | None = None
        self._over = limit_secs == 0

    def late(self, running: Sequence[str], *, now: float) -> str | None:
        """Returns a text for the user once a limit has passed, else None.

        `running` are the names of the tasks that have not ended.
        """
        if self._over or not running:
            return None
        waited_for = [n for n in running if not self._ready_files[n].exists()]
        if not waited_for:
            self._over = True
            return None
        absent = [n for n in waited_for if not self._has_appeared(n)]
        if self._appeared is None and any(
            self._has_appeared(name) for name in self._ready_files
        ):
            self._appeared = now
        since = self._launch if self._appeared is None else self._appeared
        if now - since < self._limit_secs:
            return None
        self._over = True
        if absent:
            return self._message(absent, "did not appear")
        return self._message(waited_for, "appeared but did not connect")

    def unseen(self, *, has_metrics: bool) -> str | None:
        """Returns a warning if all tasks have ended and none had appeared.

        A group of one task may do without, if it has written its metrics: it
        has no other worker, and its training tells by itself if no teacher
        came.
        """
        is_alone = len(self._ready_files) == 1
        if (
            self._limit_secs == 0
            or (is_alone and has_metrics)
            or any(map(self._has_appeared, self._ready_files))
        ):
            return None
        return (
            "no task has called tfdistill.make_strategy, so that each task "
            "trained by itself, if it trained at all. Call it before any other "
            "operation of TensorFlow (docs/guide.md); for a script that does "
            "not use tfdistill pass --start_timeout_secs=0."
        )

    def _has_appeared(self, name: str) -> bool:
        path = self._ready_files[name]
        return path.exists() or signs.found_starting(path)

    def _message(self, names: Sequence[str], what: str) -> str:
        return (
            f"{', '.join(names)} {what} within {self._limit_secs:g} s. Look "
            "at the log; raise --start_timeout_secs if start-up is slow, or "
            "set it to 0 for a script that never calls "
            "tfdistill.make_strategy."
        )


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


class ProgressLimit:
    """Judges one task by when its reports change.

    The limit for a phase is `stuck_secs`, or ten times the longest of the
    recent silences in that phase if that is more, so that slow steps and a
    busy machine are not taken for a hang; steps may take twice as long as the
    first of an epoch, too, as TensorFlow may trace again. A phase not seen
    before, and all that callbacks do, may take ten minutes, or ten times what
    it took before. A task that does not report, or is in no phase of the
    library's, is not judged.

    Times are seconds of any one clock, passed in.
    """

    def __init__(self, *, stuck_secs: float) -> None:
        """Less than `stuck_secs` never counts as stuck; 0: nothing does."""
        self._stuck_secs = stuck_secs
        self._line: signs.Line | None = None
        self._changed = 0.0
        self._recent: dict[str, collections.deque[float]] = {}

    @property
    def phase(self) -> str:
        """What the task said last that it is at; `IDLE` at first."""
        return self._line.phase if self._line else signs.IDLE

    def note(self, line: signs.Line | None, *, now: float) -> None:
        """Takes in the task's present report; None if there is none."""
        if line is None or line == self._line:
            return
        if self._line is not None:
            gaps = self._recent.setdefault(
                self._line.phase, collections.deque(maxlen=_NUM_RECENT)
            )
            gaps.append(now - self._changed)
        self._line, self._changed = line, now

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
        limit = max(self._stuck_secs, _FACTOR * longest)
        if phase in _OF_THE_USER or not longest:
            return max(limit, _UNKNOWN_SECS)
        first = _FIRST_STEPS.get(phase)
        if first is not None:
            limit = max(limit, _TRACE_FACTOR * self._longest(first))
        return limit

    def is_stuck(self, *, now: float) -> bool:
        """Whether the task has been silent for longer than that."""
        return self.silent_secs(now=now) > self.limit_secs()

    def _longest(self, phase: str) -> float:
        return max(self._recent.get(phase, ()), default=0.0)


_LONGEST_TICK_SECS = 1.0


class AwakeClock:
    """Seconds that advance by at most one between two readings."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._total = 0.0

    def read(self) -> float:
        """Returns the seconds since the start, sleep left out."""
        now = self._clock()
        self._total += min(now - self._last, _LONGEST_TICK_SECS)
        self._last = now
        return self._total


# A server says something twice a second, whatever the model. While one does
# not, its chief is not blamed for what may be the server's fault.
_SUSPICIOUS_SECS = 2.0
# The steps of a group stand still while a worker that was lost comes back.
_RETURN_SECS = 60.0
# Phases in which others may have to wait for a task for good reasons.
_FREE = frozenset({signs.IDLE, signs.CALLBACKS, signs.EPOCH_END})


class TaskWatch:
    """Watches the tasks of one attempt to run a group."""

    def __init__(
        self,
        tasks: Mapping[str, local_cluster.Task],
        *,
        topology: local_cluster.LocalCluster,
        note: Callable[..., None],
        clock: AwakeClock | None = None,
    ) -> None:
        """Will `note` events of `run_events`, each by its name and details."""
        self._note = note
        self._tasks = dict(tasks)
        self._frozen_secs = topology.frozen_secs
        self._clock = clock or AwakeClock()
        self._stopped: dict[str, float] = {}
        self._lost: dict[str, float] = {}
        servers = {
            name
            for name, task in tasks.items()
            if topology.ps_per_group and task.cluster.task_type != "chief"
        }
        self._trainers = [name for name in tasks if name not in servers]
        self._servers = sorted(servers)
        self._stuck_secs = topology.stuck_secs
        self._progress = {name: self._new_watch() for name in tasks}

    def _new_watch(self) -> ProgressLimit:
        return ProgressLimit(stuck_secs=self._stuck_secs)

    def note_end(self, name: str) -> None:
        """Takes in that a worker is gone, and will be started again."""
        self._stopped.pop(name, None)
        self._lost[name] = self._clock.read()
        self._progress[name] = self._new_watch()

    def look(
        self, processes: Mapping[str, task_process.TaskProcess]
    ) -> dict[str | None, str]:
        """Returns which tasks must be killed, and why; None: the whole group.

        Notes what else has become of them since the last look.
        """
        now = self._clock.read()
        running = {n: p for n, p in processes.items() if p.exit_code is None}
        doomed = self._frozen(running, now)
        for name in running:
            line = signs.read_progress(self._tasks[name].ready_path)
            self._progress[name].note(line, now=now)
        self._excuse(running, now)
        servers = [name for name in self._servers if name in running]
        for name in servers:
            if self._progress[name].is_stuck(now=now):
                doomed[name] = self._stuck(name, now)
        suspicious = any(
            self._progress[name].phase == signs.SERVING
            and self._progress[name].silent_secs(now=now) > _SUSPICIOUS_SECS
            for name in servers
        )
        if not suspicious and any(
            self._progress[name].is_stuck(now=now)
            for name in self._trainers
            if name in running
        ):
            doomed[None] = self._group_stuck(list(running), now)
        return doomed

    def _frozen(
        self, running: Mapping[str, task_process.TaskProcess], now: float
    ) -> dict[str | None, str]:
        doomed: dict[str | None, str] = {}
        for name, process in running.items():
            since = self._stopped.get(name)
            if not process.is_stopped:
                if self._stopped.pop(name, None) is not None:
                    self._note("continued", task=name)
            elif since is None:
                self._stopped[name] = now
                self._note("stopped_by_signal", task=name)
            elif self._frozen_secs and now - since >= self._frozen_secs:
                self._note("frozen", task=name, silent_secs=now - since)
                self._stopped[name] = float("inf")  # Once is enough.
                doomed[name] = (
                    f"{name} was frozen: a signal had stopped it for "
                    f"{now - since:.1f} s (--frozen_secs), so it was killed"
                )
        return doomed

    def _excuse(
        self, running: Mapping[str, task_process.TaskProcess], now: float
    ) -> None:
        """Forgives tasks that wait for another which may take its time."""
        for name, since in list(self._lost.items()):
            here = self._progress[name].phase == signs.SERVING
            if now - since > _RETURN_SECS or (
                name in running and here and name not in self._stopped
            ):
                del self._lost[name]
        free = [
            name
            for name in self._trainers
            if self._progress[name].phase in _FREE
            and not self._progress[name].is_stuck(now=now)
        ]
        # One that is stopped will soon be killed, or is being debugged.
        free += [*self._lost, *self._stopped]
        for name in self._trainers:
            if any(other != name for other in free):
                self._progress[name].excuse(now=now)
        for name in self._stopped:
            self._progress[name].excuse(now=now)

    def _stuck(self, name: str, now: float) -> str:
        watch = self._progress[name]
        silent = watch.silent_secs(now=now)
        self._note("stuck", task=name, silent_secs=silent, phase=watch.phase)
        return (
            f"{name} was stuck: it has said nothing for {silent:.1f} s "
            "(--stuck_secs), so it was killed"
        )

    def _group_stuck(self, running: list[str], now: float) -> str:
        silences = {
            name: self._progress[name].silent_secs(now=now)
            for name in self._trainers
            if name in running
        }
        said = ", ".join(
            f"{name} {secs:.1f} s ({self._progress[name].phase})"
            for name, secs in silences.items()
        )
        longest = max(silences, key=lambda name: silences[name])
        phase = self._progress[longest].phase
        self._note("stuck", silent_secs=silences[longest], phase=phase)
        return (
            f"no progress, so it was killed; silent for: {said}. Steps that "
            "may take longer need a higher --stuck_secs (0 for none)"
        )
