"""Finds the tasks that are late, frozen, or there and yet do nothing.

TensorFlow misses most of them: it takes ten seconds to note a frozen peer and
never notes one that hangs, and a coordinator waits for its workers and ps
without a limit. A task cannot watch itself either: what hangs may hold Python's
lock. So the launcher looks at its processes, and at the progress they report.

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
from tfdistill.system import processes


class StartLimit:
    """Judges whether the tasks of one group connect within the time limit.

    Tasks that have ended are not waited for. Times are seconds of any one
    clock, passed in.
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
        self._over = limit_secs == 0

    def late(self, running: Sequence[str], *, now: float) -> str | None:
        """Returns a text for the user once the limit has passed, else None.

        `running` are the names of the tasks that have not ended.
        """
        if self._over:
            return None
        late = [n for n in running if not self._ready_files[n].exists()]
        in_time = now - self._launch < self._limit_secs
        # Once all are there, too: one that is lost later may come back.
        self._over = not late or not in_time
        if in_time or not late:
            return None
        absent = [name for name in late if not self._has_appeared(name)]
        what = "did not appear" if absent else "appeared but did not connect"
        return (
            f"{', '.join(absent or late)} {what} within {self._limit_secs:g} "
            "s. Look at the log; raise --start_timeout_secs if start-up is "
            "slow, or set it to 0 for a script that never calls "
            "tfdistill.make_strategy."
        )

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
# A task that a signal has stopped for so long is no longer expected to go on.
_FROZEN_SECS = 3.0
# As the kernel names that state; "t" is a debugger's stop.
_STOPPED = "T"
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
        """Will `note` who is frozen or stuck, by an event and its details."""
        self._note = note
        self._tasks = dict(tasks)
        self._clock = clock or AwakeClock()
        self._lost: dict[str, float] = {}
        self._stopped: dict[str, float] = {}
        self._servers = {
            name
            for name, task in tasks.items()
            if topology.ps_per_group and task.cluster.task_type != "chief"
        }
        self._stuck_secs = topology.stuck_secs
        self._progress = {name: self._new_watch() for name in tasks}

    def _new_watch(self) -> ProgressLimit:
        return ProgressLimit(stuck_secs=self._stuck_secs)

    def note_end(self, name: str) -> None:
        """Takes in that a worker is gone, and will be started again."""
        self._lost[name] = self._clock.read()
        self._progress[name] = self._new_watch()

    def look(self, running: Mapping[str, int | None]) -> dict[str | None, str]:
        """Returns which tasks must be killed, and why; None: the whole group.

        `running` are the process ids, as far as they are known, of the tasks
        that have not ended, by name.
        """
        now = self._clock.read()
        for name in running:
            line = signs.read_progress(self._tasks[name].ready_path)
            self._progress[name].note(line, now=now)
        trainers = [name for name in running if name not in self._servers]
        self._excuse(trainers, running, now)
        doomed = self._frozen(running, now)
        suspicious = False
        for name in self._servers.intersection(running):
            watch = self._progress[name]
            silent = watch.silent_secs(now=now)
            suspicious |= (
                watch.phase == signs.SERVING and silent > _SUSPICIOUS_SECS
            )
            if watch.is_stuck(now=now):
                doomed[name] = self._stuck([name], now, task=name)
        if not suspicious and any(
            self._progress[name].is_stuck(now=now) for name in trainers
        ):
            doomed[None] = self._stuck(trainers, now)
        return doomed

    def _frozen(
        self, running: Mapping[str, int | None], now: float
    ) -> dict[str | None, str]:
        """Returns the tasks that a signal has stopped for too long, and why."""
        doomed: dict[str | None, str] = {}
        for name, pid in running.items():
            if pid is None or processes.state_of(pid) != _STOPPED:
                self._stopped.pop(name, None)
                continue
            secs = now - self._stopped.setdefault(name, now)
            if secs < _FROZEN_SECS or not self._stuck_secs:
                continue
            self._note("frozen", task=name, silent_secs=secs)
            doomed[name] = (
                f"{name} was frozen: a signal had stopped it for {secs:.1f} s, "
                "so it was killed"
            )
        return doomed

    def _excuse(
        self,
        trainers: Sequence[str],
        running: Mapping[str, int | None],
        now: float,
    ) -> None:
        """Forgives tasks that wait for another which may take its time."""
        for name, since in list(self._lost.items()):
            here = self._progress[name].phase == signs.SERVING
            if now - since > _RETURN_SECS or (name in running and here):
                del self._lost[name]
        free = [
            name
            for name in trainers
            if self._progress[name].phase in _FREE
            and not self._progress[name].is_stuck(now=now)
        ]
        for name in trainers:
            if any(other != name for other in [*free, *self._lost]):
                self._progress[name].excuse(now=now)

    def _stuck(
        self, names: Sequence[str], now: float, task: str | None = None
    ) -> str:
        silences = {n: self._progress[n].silent_secs(now=now) for n in names}
        longest = max(silences, key=lambda name: silences[name])
        self._note(
            "stuck",
            task=task,
            silent_secs=silences[longest],
            phase=self._progress[longest].phase,
        )
        said = ", ".join(
            f"{name} {secs:.1f} s ({self._progress[name].phase})"
            for name, secs in silences.items()
        )
        return (
            f"no progress, so it was killed; silent for: {said}. Steps that "
            "may take longer need a higher --stuck_secs (0 for none)"
        )
